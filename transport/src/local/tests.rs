use crate::frame::InvalidFrame;
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream as StdStream;
use std::time::Duration;

use serde::Deserialize;

use super::*;

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Note(String);

fn note(text: &str) -> Note {
    Note(text.to_owned())
}

/// A descriptor that can be told from others: a pipe with a letter in it.
fn marked(letter: u8) -> OwnedFd {
    let (read, write) = rustix::pipe::pipe().unwrap();
    File::from(write).write_all(&[letter]).unwrap();
    read
}

fn letters(fds: Vec<OwnedFd>) -> String {
    fds.into_iter()
        .map(|fd| {
            let flags = rustix::io::fcntl_getfd(&fd).unwrap();
            assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
            let mut text = String::new();
            File::from(fd).read_to_string(&mut text).unwrap();
            text
        })
        .collect()
}

async fn within<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(Duration::from_secs(60), future)
        .await
        .expect("it happens in time")
}

fn pair() -> (ControlSocket, ControlSocket) {
    let (one, other) = ControlSocket::pair().unwrap();
    (one, ControlSocket::from_fd(other).unwrap())
}

async fn send(socket: &ControlSocket, text: &str, letters: &[u8]) {
    let fds: Vec<OwnedFd> = letters.iter().map(|letter| marked(*letter)).collect();
    let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
    within(socket.send(&note(text), &fds)).await.unwrap();
}

async fn recv(socket: &ControlSocket) -> Option<(String, String)> {
    let received = within(socket.recv::<Note>()).await.unwrap();
    received.map(|(note, fds)| (note.0, letters(fds)))
}

#[tokio::test]
async fn descriptors_stay_with_their_frames() {
    let (one, other) = pair();
    let all = "abcdefghijklmnop";
    assert_eq!(all.len(), MAX_FDS);
    let sent = [
        ("1", ""),
        ("2", "x"),
        ("3", ""),
        ("4", "yz"),
        ("5", all),
        ("6", "w"),
        ("7", ""),
    ];
    // All of them lie in the socket before the first is received.
    for (text, letters) in sent {
        send(&one, text, letters.as_bytes()).await;
    }
    drop(one);
    for (text, letters) in sent {
        assert_eq!(
            recv(&other).await,
            Some((text.to_owned(), letters.to_owned()))
        );
    }
    assert_eq!(recv(&other).await, None);
    assert_eq!(recv(&other).await, None);
}

#[tokio::test]
async fn a_frame_in_single_bytes_is_put_together() {
    let (one, other) = StdStream::pair().unwrap();
    let mut receiver = FdReceiver::new();
    for round in [b'r', b's'] {
        let frame = encode(&note("slow"), 1).unwrap();
        let fd = marked(round);
        for (index, byte) in frame.iter().enumerate() {
            assert!(receiver.next::<Note>().unwrap().is_none());
            let fds = [fd.as_fd()];
            let fds = if index == 0 { &fds[..] } else { &[] };
            assert_eq!(send_some(one.as_fd(), &[*byte], fds).unwrap(), 1);
            assert_eq!(receiver.fill(other.as_fd()).unwrap(), 1);
        }
        let (received, fds) = receiver.next::<Note>().unwrap().unwrap();
        assert_eq!(
            (received, letters(fds)),
            (note("slow"), char::from(round).to_string())
        );
    }
}

#[tokio::test]
async fn long_frames_of_many_senders_are_not_mixed() {
    let (one, other) = pair();
    let one = std::sync::Arc::new(one);
    let mut senders = tokio::task::JoinSet::new();
    for letter in b'a'..=b'h' {
        let one = one.clone();
        senders.spawn(async move {
            let text = char::from(letter).to_string().repeat(1_000_000);
            send(&one, &text, &[letter]).await;
        });
    }
    let mut seen = String::new();
    for _ in 0..8 {
        let (text, letters) = recv(&other).await.unwrap();
        assert_eq!(text, letters.repeat(1_000_000));
        seen += &letters;
    }
    assert_eq!(seen.len(), 8);
    within(senders.join_all()).await;
}

#[tokio::test]
async fn a_cancelled_send_is_completed_by_the_next() {
    let (one, other) = pair();
    let text = "x".repeat(3_000_000);
    let fd = marked(b'f');
    let long = note(&text);
    let fds = [fd.as_fd()];
    tokio::select! {
        // More than the socket holds, and nobody receives.
        sent = one.send(&long, &fds) => panic!("{sent:?}"),
        () = tokio::time::sleep(Duration::from_millis(50)) => {}
    }
    drop(fd);
    let (first, ()) = within(async { tokio::join!(recv(&other), send(&one, "next", b"g")) }).await;
    assert_eq!(first, Some((text, "f".to_owned())));
    assert_eq!(
        recv(&other).await,
        Some(("next".to_owned(), "g".to_owned()))
    );
}

#[tokio::test]
async fn waiting_for_a_frame_can_be_given_up() {
    let (one, other) = pair();
    tokio::select! {
        received = other.recv::<Note>() => panic!("{received:?}"),
        () = tokio::task::yield_now() => {}
    }
    send(&one, "late", b"l").await;
    assert_eq!(
        recv(&other).await,
        Some(("late".to_owned(), "l".to_owned()))
    );
}

#[tokio::test]
async fn the_end_is_seen_whole_or_inside_a_frame() {
    let (one, other) = pair();
    send(&one, "one way", b"").await;
    one.shutdown().unwrap();
    send(&other, "the other", b"").await;
    assert_eq!(
        recv(&one).await,
        Some(("the other".to_owned(), String::new()))
    );
    assert_eq!(
        recv(&other).await,
        Some(("one way".to_owned(), String::new()))
    );
    assert_eq!(recv(&other).await, None);
    // The peer is gone with a frame in its socket that it never read.
    send(&other, "unread", b"u").await;
    drop(one);
    assert_eq!(recv(&other).await, None);
    let gone = within(other.send(&note("x"), &[])).await;
    assert!(matches!(gone, Err(FrameError::Io(_))), "{gone:?}");

    let (one, other) = StdStream::pair().unwrap();
    let other = ControlSocket::from_fd(other.into()).unwrap();
    (&one)
        .write_all(&encode(&note("half"), 0).unwrap()[..9])
        .unwrap();
    drop(one);
    let half = within(other.recv::<Note>()).await;
    assert_eq!(half.unwrap_err(), FrameError::Truncated { got: 9 });
}

/// What a receiver says to these sends: bytes, and how many descriptors beside them.
fn answer(sends: &[(&[u8], usize)]) -> String {
    let (one, other) = StdStream::pair().unwrap();
    let mut receiver = FdReceiver::new();
    let fd = marked(b'm');
    for (bytes, count) in sends {
        send_some(one.as_fd(), bytes, &vec![fd.as_fd(); *count]).unwrap();
        if let Err(error) = receiver.fill(other.as_fd()) {
            return error.to_string();
        }
        match receiver.next::<Note>() {
            Ok(None) => {}
            Ok(Some((_, fds))) => return format!("{} descriptors", fds.len()),
            Err(error) => return error.to_string(),
        }
    }
    "nothing".to_owned()
}

#[test]
fn descriptors_that_match_no_frame_are_refused() {
    let none = encode(&note("n"), 0).unwrap();
    let two = encode(&note("n"), 2).unwrap();
    let head = |reason: &str| format!("a frame's head is not a control message: {reason}");
    assert_eq!(answer(&[(&two, 2)]), "2 descriptors");
    let reason = head("a frame announces 2 descriptors and 3 came");
    assert_eq!(answer(&[(&two, 3)]), reason);
    let reason = head("a frame announces 2 descriptors and 1 came");
    assert_eq!(answer(&[(&two, 1)]), reason);
    assert_eq!(
        answer(&[(&two, 0)]),
        head("a frame announces descriptors and none came")
    );
    assert_eq!(answer(&[(&none, 0)]), "0 descriptors");
    // One per byte, and no frame is ever complete.
    let drip: Vec<(&[u8], usize)> = two.chunks(1).map(|byte| (byte, 1)).collect();
    assert_eq!(answer(&drip), "descriptors came that belong to no frame");

    let (one, other) = StdStream::pair().unwrap();
    let mut receiver = FdReceiver::new();
    send_some(one.as_fd(), &none, &[marked(b'm').as_fd()]).unwrap();
    receiver.fill(other.as_fd()).unwrap();
    assert!(receiver.next::<Note>().unwrap().is_some());
    let error = receiver.next::<Note>().unwrap_err().to_string();
    assert_eq!(
        error,
        head("descriptors came with a frame that announces none")
    );
}

#[test]
fn more_descriptors_than_there_is_room_for_are_a_short_list() {
    let (one, other) = StdStream::pair().unwrap();
    let mut frame = encode(&note("n"), 1).unwrap();
    let count = frame.len() - 1;
    frame[count] = 20;
    // Past the limit of `send_some`.
    let fd = marked(b'm');
    let fds = [fd.as_fd(); 20];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(20))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    rustix::net::sendmsg(
        &one,
        &[IoSlice::new(&frame)],
        &mut control,
        SendFlags::NOSIGNAL,
    )
    .unwrap();
    let mut receiver = FdReceiver::new();
    receiver.fill(other.as_fd()).unwrap();
    let (_, fds) = receiver.next::<Note>().unwrap().unwrap();
    assert!((MAX_FDS..20).contains(&fds.len()), "{}", fds.len());
}

#[tokio::test]
async fn what_cannot_be_sent_or_used_is_refused() {
    let (one, _other) = pair();
    let fd = marked(b'm');
    let error = one
        .send(&note(""), &[fd.as_fd(); MAX_FDS + 1])
        .await
        .unwrap_err();
    assert!(
        error
            .to_string()
            .contains("17 descriptors with one frame, allowed are 16")
    );
    let long = note(&"x".repeat(5 << 20));
    let error = one.send(&long, &[]).await.unwrap_err();
    assert!(
        matches!(
            error,
            FrameError::Invalid(InvalidFrame::TooLong { part: "head", .. })
        ),
        "{error}"
    );
    // A socket of another kind, and no socket.
    let (datagram, _other) = std::os::unix::net::UnixDatagram::pair().unwrap();
    let error = ControlSocket::from_fd(datagram.into()).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    assert!(ControlSocket::from_fd(fd).is_err());
}
