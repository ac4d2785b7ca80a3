//! Output of real processes arrives whole.

mod common;

use common::{script, warden, within};
use kolo_process::{LineReader, pipe};
use kolo_transport::wire::Exit;

#[tokio::test]
async fn a_flood_arrives_without_loss() {
    const LINES: u64 = 1_000_000;
    let warden = warden().await;
    let mut started = script(&format!("seq {LINES}; echo end >&2"))
        .start(&warden)
        .await;
    let mut next = 1;
    while let Some(line) = within(started.stdout.next_line()).await {
        assert_eq!(std::str::from_utf8(&line).unwrap().parse(), Ok(next));
        next += 1;
        while let Some(line) = started.stdout.buffered_line() {
            assert_eq!(std::str::from_utf8(&line).unwrap().parse(), Ok(next));
            next += 1;
        }
    }
    assert_eq!(next, LINES + 1);
    assert_eq!(common::rest(&mut started.stderr).await, ["end"]);
    assert_eq!(within(started.child.wait()).await, Exit::Code(0));
    within(warden.close()).await;
}

#[tokio::test]
async fn waiting_for_a_line_can_be_given_up() {
    let (read, write) = pipe().unwrap();
    let mut reader = LineReader::new(read).unwrap();
    let write = std::fs::File::from(write);
    std::io::Write::write_all(&mut &write, b"half ").unwrap();
    tokio::select! {
        line = reader.next_line() => panic!("{line:?}"),
        () = async { for _ in 0..10 { tokio::task::yield_now().await } } => {}
    }
    std::io::Write::write_all(&mut &write, b"and half\n").unwrap();
    assert_eq!(
        within(reader.next_line()).await.as_deref(),
        Some(&b"half and half"[..])
    );
    assert_eq!(reader.buffered_line(), None);
    drop(write);
    assert_eq!(within(reader.next_line()).await, None);
    assert_eq!(within(reader.next_line()).await, None);
}

#[tokio::test]
async fn only_the_read_end_of_a_pipe_is_accepted() {
    let (_read, write) = pipe().unwrap();
    let error = LineReader::new(write).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput);
    let file = std::fs::File::open("/dev/null").unwrap();
    assert!(LineReader::new(file.into()).is_err());
}
