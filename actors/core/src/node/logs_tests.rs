use proptest::prelude::*;

use super::*;

fn book(lines: usize, bytes: usize) -> LogBook {
    LogBook::new(LogLimits { lines, bytes })
}

/// What is new for a reader, each line with its rank.
fn read(book: &LogBook, cursor: &mut Cursor) -> Vec<String> {
    let lines = book.read(cursor, 1 << 20).lines.into_iter();
    let text = |line: LogLine| format!("{}:{}", line.rank, String::from_utf8_lossy(&line.text));
    lines.map(text).collect()
}

/// A process whose rank is the number of its slot.
fn of(rank: u32) -> Writer {
    Writer {
        slot: Slot(rank),
        rank: Rank(rank),
    }
}

fn push(book: &mut LogBook, rank: u32, text: &str) {
    book.push(of(rank), Stdio::Stdout, 0, text.as_bytes());
}

#[test]
fn lines_of_all_ranks_come_in_the_order_in_which_they_were_written() {
    let mut book = book(10, 10_000);
    for (rank, text) in [(1, "a"), (0, "b"), (1, "c"), (0, "d")] {
        push(&mut book, rank, text);
    }
    let mut all = book.cursor(&[], None);
    assert_eq!(read(&book, &mut all), ["1:a", "0:b", "1:c", "0:d"]);
    assert!(read(&book, &mut all).is_empty());
    push(&mut book, 2, "e");
    assert_eq!(read(&book, &mut all), ["2:e"], "a rank that is new");
    let mut one = book.cursor(&[Rank(0)], None);
    assert_eq!(read(&book, &mut one), ["0:b", "0:d"]);
}

#[test]
fn a_tail_is_counted_per_rank() {
    let mut book = book(10, 10_000);
    for (rank, text) in [(0, "a"), (0, "b"), (0, "c"), (1, "d")] {
        push(&mut book, rank, text);
    }
    let mut cursor = book.cursor(&[], Some(2));
    assert_eq!(read(&book, &mut cursor), ["0:b", "0:c", "1:d"]);
    let mut cursor = book.cursor(&[], Some(0));
    assert!(read(&book, &mut cursor).is_empty());
    push(&mut book, 0, "e");
    assert_eq!(read(&book, &mut cursor), ["0:e"]);
}

#[test]
fn processes_of_a_slot_follow_each_other_and_lines_have_the_rank_of_their_time() {
    let mut book = book(10, 10_000);
    let at = |slot, rank| Writer {
        slot: Slot(slot),
        rank: Rank(rank),
    };
    let error = |book: &mut LogBook, writer, text: &str| {
        book.push(writer, Stdio::Stderr, 0, text.as_bytes());
    };
    error(&mut book, at(3, 3), "first, no rank yet");
    error(&mut book, at(3, 0), "first, rank 0");
    let second = book.next_index();
    error(&mut book, at(1, 0), "another slot, rank 0");
    error(&mut book, at(3, 3), "second, no rank yet");
    let mut of_rank = book.cursor(&[Rank(0)], None);
    let expected = ["0:first, rank 0", "0:another slot, rank 0"];
    assert_eq!(read(&book, &mut of_rank), expected);
    error(&mut book, at(3, 1), "second, rank 1");
    assert!(read(&book, &mut of_rank).is_empty());
    error(&mut book, at(3, 0), "second, rank 0");
    // The log of the slot goes on.
    assert_eq!(book.read(&mut of_rank.clone(), 1 << 20).lines[0].seq, 4);
    assert_eq!(read(&book, &mut of_rank), ["0:second, rank 0"]);
    let mut last = book.cursor(&[Rank(3)], Some(1));
    assert_eq!(read(&book, &mut last), ["3:second, no rank yet"]);
    // The last words of a process are its own.
    let tail = book.stderr_tail((Slot(3), second), 20);
    let expected = ["second, no rank yet", "second, rank 1", "second, rank 0"];
    assert_eq!(tail, expected);
}

#[test]
fn a_slow_reader_misses_lines_and_sees_it_in_their_numbers() {
    let mut book = book(3, 10_000);
    push(&mut book, 0, "0");
    let mut cursor = book.cursor(&[], None);
    assert_eq!(book.read(&mut cursor, 1 << 20).lines[0].seq, 0);
    for number in 1..10 {
        push(&mut book, 0, &number.to_string());
    }
    let lines = book.read(&mut cursor, 1 << 20).lines;
    let seqs = lines.iter().map(|line| line.seq);
    assert_eq!(seqs.collect::<Vec<_>>(), [7, 8, 9]);
}

#[test]
fn a_long_line_is_kept_alone_and_sent_alone() {
    let mut book = book(10, 500);
    push(&mut book, 0, "short");
    push(&mut book, 0, &"x".repeat(1000));
    let mut cursor = book.cursor(&[], None);
    let batch = book.read(&mut cursor, 10);
    assert_eq!(batch.lines.len(), 1);
    assert_eq!(batch.lines[0].text.len(), 1000);
}

#[test]
fn the_tail_of_standard_error_is_text_of_that_stream_only() {
    let mut book = book(100, 100_000);
    for number in 0..30 {
        let text = format!("{number}");
        book.push(of(0), Stdio::Stderr, 0, text.as_bytes());
        book.push(of(0), Stdio::Stdout, 0, b"out");
    }
    book.push(of(0), Stdio::Stderr, 0, &[0xff, b'!']);
    let tail = book.stderr_tail((Slot(0), 0), 3);
    assert_eq!(tail, ["28", "29", "\u{fffd}!"]);
    let long = "é".repeat(40_000).into_bytes();
    book.push(of(0), Stdio::Stderr, 0, &[b"x", &long[..]].concat());
    let tail = book.stderr_tail((Slot(0), 0), 1);
    assert_eq!(tail, [format!("x{}…", "é".repeat((TAIL_LINE - 1) / 2))]);
    assert!(book.stderr_tail((Slot(9), 0), 3).is_empty());
}

#[test]
fn a_line_that_was_written_over_is_one_line_with_its_last_state() {
    // Lines end with LF, or with CR where the next one is written over them.
    for (output, limit, tail) in [
        ("", 20, &[][..]),
        ("a\n\nb\n", 20, &["a", "", "b"]),
        // A progress bar in pieces, and what follows it.
        ("10%\r20%\r30%\rboom\n", 20, &["boom"]),
        ("10%\r30%\nboom\n", 20, &["30%", "boom"]),
        // CR and LF that came apart.
        ("10%\r30%\r\nboom\n", 20, &["30%", "boom"]),
        // At the end, with nothing over it.
        ("start\n10%\r30%\r", 20, &["start", "30%"]),
        // As many lines as are wanted, whatever is between them.
        ("a\nb\n1\r2\rc\n", 2, &["b", "c"]),
        ("a\n1\r2\r", 1, &["2"]),
        ("a\n", 0, &[]),
    ] {
        let lines: Vec<&str> = output.split_inclusive(['\r', '\n']).collect();
        let newest_first = lines.into_iter().rev();
        let newest_first =
            newest_first.map(|line| (&line.as_bytes()[..line.len() - 1], line.ends_with('\r')));
        assert_eq!(last_states(newest_first, limit), tail, "{output:?}");
    }
    // In one piece, CR before or behind each state.
    for (lines, tail) in [
        (&["10%\r20%\r30%", "boom"][..], &["30%", "boom"][..]),
        (&["\r10%\r30%\r"], &["30%"]),
        (&["\r\r"], &[""]),
    ] {
        let newest_first = lines.iter().rev().map(|text| (text.as_bytes(), false));
        assert_eq!(last_states(newest_first, 20), tail, "{lines:?}");
    }
}

#[test]
fn the_rank_that_has_most_sheds_first_and_the_newest_lines_last() {
    let mut book = book(10_000, 16 * SMALLEST_BLOCK);
    push(&mut book, 0, "quiet");
    for number in 0..100 {
        push(&mut book, 1, &format!("{number:079}"));
    }
    let seqs = |book: &LogBook| -> Vec<(u32, u64)> {
        let mut all = book.cursor(&[], None);
        let lines = book.read(&mut all, 1 << 20).lines;
        lines.iter().map(|line| (line.rank.0, line.seq)).collect()
    };
    while seqs(&book).len() > 3 {
        let before = book.bytes();
        assert!(book.shed() && book.bytes() < before);
    }
    assert_eq!(seqs(&book), [(0, 0), (1, 98), (1, 99)]);
    // The newest lines go last.
    assert!(book.shed() && book.shed());
    assert_eq!(seqs(&book).len(), 1);
    assert!(book.shed() && !book.shed());
    assert_eq!(book.bytes(), 2 * SLOT_OVERHEAD);
    push(&mut book, 1, "next");
    let mut all = book.cursor(&[], None);
    assert_eq!(seqs(&book), [(1, 100)]);
    book.clear();
    assert_eq!(book.bytes(), 0);
    assert!(read(&book, &mut all).is_empty());
}

proptest! {
    /// Any number of reads of any size gives each line that is kept once, in order, and the ring
    /// stays inside its limits.
    #[test]
    fn reads_of_any_size_give_every_line_once(
        lines in proptest::collection::vec((0_u32..4, 0_usize..50), 0..100),
        max_bytes in 1_usize..500,
        limit in 1_usize..30,
    ) {
        let mut book = book(limit, 1500);
        for (rank, len) in lines {
            push(&mut book, rank, &"x".repeat(len));
        }
        let mut taken = 0;
        for ring in book.rings.values() {
            let bytes: usize = ring.blocks.iter().map(|block| block.bytes.capacity()).sum();
            prop_assert!(ring.lines <= limit && bytes <= 1500);
            prop_assert_eq!(bytes, ring.bytes);
            prop_assert_eq!(ring.from(0).count(), ring.lines);
            taken += bytes + SLOT_OVERHEAD;
        }
        prop_assert_eq!(book.bytes(), taken);
        let kept: usize = book.rings.values().map(|ring| ring.lines).sum();
        let mut whole = book.cursor(&[], None);
        let all = book.read(&mut whole, usize::MAX).lines;
        prop_assert_eq!(all.len(), kept);
        let mut cursor = book.cursor(&[], None);
        let mut seen = Vec::new();
        loop {
            let batch = book.read(&mut cursor, max_bytes);
            if batch.lines.is_empty() {
                break;
            }
            seen.extend(batch.lines);
        }
        prop_assert_eq!(seen, all);
    }
}
