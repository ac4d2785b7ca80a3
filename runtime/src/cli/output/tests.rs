use super::*;

fn shown<const N: usize>(screen: Screen, header: [&str; N], rows: &[[Cell; N]]) -> String {
    let mut bytes = Vec::new();
    let mut output = Output::new(&mut bytes, screen);
    output.table(header, rows).unwrap();
    String::from_utf8(bytes).unwrap()
}

fn table(colours: bool) -> String {
    let rows = [
        [
            Cell::from("a"),
            Cell::toned("alive", Tone::Good),
            Cell::from("1"),
        ],
        [
            Cell::from("ünïcode"),
            Cell::toned("lost", Tone::Bad),
            Cell::from(""),
        ],
    ];
    let screen = Screen {
        colours,
        ..Screen::default()
    };
    shown(screen, ["NODE", "STATE", "N"], &rows)
}

#[test]
fn a_table_fits_the_terminal() {
    let why = "rank 1 on box ended with signal 9 (SIGKILL), and nobodyknowswhythathappened";
    let rows = [
        ["job-1234", "a-name-that-is-much-too-long", why].map(Cell::from),
        ["job-5678", "short", ""].map(Cell::from),
    ];
    let header = ["JOB", "NAME", "REASON"];
    let at = |width| {
        let screen = Screen {
            width: Some(width),
            ..Screen::default()
        };
        shown(screen, header, &rows)
    };
    assert_eq!(
        at(50),
        "\
JOB       NAME
job-1234  a-name-that-is-much-too-long
  rank 1 on box ended with signal 9 (SIGKILL), and
  nobodyknowswhythathappened
job-5678  short
"
    );
    assert_eq!(
        at(30),
        "\
JOB       NAME
job-1234  a-name-that-is-much…
  rank 1 on box ended with
  signal 9 (SIGKILL), and
  nobodyknowswhythathappened
job-5678  short
"
    );
    assert_eq!(
        at(62),
        "\
JOB       NAME                          REASON
job-1234  a-name-that-is-much-too-long  rank 1 on box ended
                                        with signal 9
                                        (SIGKILL), and
                                        nobodyknowswhythathapp
                                        ened
job-5678  short
"
    );
    assert_eq!(
        at(18),
        "\
JOB
job-1234
  rank 1 on box ended
  with signal 9
  (SIGKILL), and
  nobodyknowswhythatha
  ppened
job-5678
"
    );
    assert_eq!(at(200), shown(Screen::default(), header, &rows));
    for width in 0..120 {
        // It ends, whatever there is room for.
        at(width);
    }
}

#[test]
fn a_page_says_how_much_of_it_is_not_there() {
    let page = |height, text: &str| {
        let screen = Screen {
            colours: true,
            width: Some(10),
            height,
            ..Screen::default()
        };
        let mut bytes = Vec::new();
        let shown = Output::new(&mut bytes, screen).page(text.as_bytes());
        shown.unwrap();
        String::from_utf8(bytes).unwrap()
    };
    let text = "one\ntwo\nthree\nfour\n";
    assert_eq!(page(None, text), text);
    assert_eq!(page(Some(5), text), text);
    let more = |lines: &str| format!("\x1b[2m… {lines}\x1b[0m\n");
    assert_eq!(
        page(Some(4), text),
        format!("one\ntwo\n{}", more("2 more lines"))
    );
    assert_eq!(page(Some(0), text), more("4 more lines"));
    // What is wider than the terminal takes two lines of it; colours take nothing.
    let wide = "\x1b[31m0123456789\x1b[0m\n0123456789a\nx\n";
    assert_eq!(page(Some(5), wide), wide);
    assert_eq!(
        page(Some(4), wide),
        format!("\x1b[31m0123456789\x1b[0m\n{}", more("2 more lines"))
    );
}

#[test]
fn sentences_fit_the_terminal() {
    let at = |width| {
        let screen = Screen {
            width,
            ..Screen::default()
        };
        let mut bytes = Vec::new();
        let mut output = Output::new(&mut bytes, screen);
        output.prose("  ports (a): open them, all of them").unwrap();
        String::from_utf8(bytes).unwrap()
    };
    assert_eq!(at(None), "  ports (a): open them, all of them\n");
    assert_eq!(at(Some(30)), "  ports (a): open them, all\n    of them\n");
}

#[test]
fn a_failure_has_no_colour_where_none_is_wanted() {
    assert_eq!(failure("no", Screen::default()), "no");
}

#[test]
fn columns_are_aligned() {
    assert_eq!(
        table(false),
        "NODE     STATE  N\na        alive  1\nünïcode  lost\n"
    );
}

#[test]
fn colours_do_not_change_the_alignment() {
    let plain = table(true)
        .replace("\x1b[32m", "")
        .replace("\x1b[31m", "")
        .replace("\x1b[0m", "");
    assert_ne!(plain, table(true));
    let trimmed: Vec<_> = plain.lines().map(str::trim_end).collect();
    assert_eq!(trimmed, table(false).lines().collect::<Vec<_>>());
}

#[test]
fn names_can_not_play_with_the_terminal() {
    assert_eq!(printable("a\x1b[2Jb\n"), "a\\u{1b}[2Jb\\n");
}

#[test]
fn ages_are_told_in_whole_seconds() {
    for (ms, text) in [(999, "999ms"), (59_999, "59s"), (192_999, "3m 12s")] {
        assert_eq!(human(ms).to_string(), text);
    }
}

#[test]
fn times_are_those_of_the_calendar() {
    for (ms, text) in [
        (0, "1970-01-01T00:00:00.000Z"),
        (951_782_400_000, "2000-02-29T00:00:00.000Z"),
        (951_868_799_999, "2000-02-29T23:59:59.999Z"),
        (4_107_542_400_000, "2100-03-01T00:00:00.000Z"),
        (1_735_689_599_001, "2024-12-31T23:59:59.001Z"),
    ] {
        assert_eq!(timestamp(ms), text);
    }
}
