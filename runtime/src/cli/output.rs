//! Tables, times, colours and JSON.

use std::io::{self, IsTerminal as _, Write};
use std::time::{Duration, SystemTime};

use kolo_transport::wire::counted::Counted;
use kolo_transport::wire::ink::{self, RED, RESET};
use kolo_transport::wire::span::Span;
use rustix::fd::BorrowedFd;
use serde::Serialize;

use super::error::CliError;

/// What the terminals of a command can show.
#[derive(Debug, Clone, Copy, Default)]
pub struct Screen {
    /// Whether results may have colours.
    pub colours: bool,
    /// Whether messages on standard error may have colours.
    pub message_colours: bool,
    /// The columns of the terminal that shows the results; `None` if none does.
    pub width: Option<usize>,
    /// The lines of that terminal, if that is known.
    pub height: Option<usize>,
}

impl Screen {
    /// The screen of this process: colours only on a terminal that can show them, and not with `NO_COLOR`
    /// (<https://no-color.org>).
    #[must_use]
    pub fn of_this_process() -> Self {
        let wanted = ink::is_wanted(std::env::var_os);
        let stdout = io::stdout();
        let [width, height] = rustix::termios::tcgetwinsize(&stdout)
            .map_or([0; 2], |size| [size.ws_col, size.ws_row].map(usize::from));
        Self {
            colours: wanted && stdout.is_terminal(),
            message_colours: wanted && io::stderr().is_terminal(),
            // Some terminals do not say.
            width: stdout
                .is_terminal()
                .then_some(if width == 0 { 80 } else { width }),
            height: (height > 0 && stdout.is_terminal()).then_some(height),
        }
    }
}

/// Where results go.
pub(super) struct Output<'a> {
    out: &'a mut dyn Write,
    screen: Screen,
}

/// What a text says, for the colour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tone {
    Plain,
    Good,
    Bad,
    Changing,
    Faint,
}

impl Tone {
    fn code(self) -> &'static str {
        match self {
            Self::Plain => "",
            Self::Good => "\x1b[32m",
            Self::Bad => RED,
            Self::Changing => "\x1b[33m",
            Self::Faint => "\x1b[2m",
        }
    }
}

/// One field of a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Cell {
    text: String,
    tone: Tone,
}

impl Cell {
    pub(super) fn toned(text: impl Into<String>, tone: Tone) -> Self {
        Self {
            text: printable(&text.into()),
            tone,
        }
    }
}

impl<T: Into<String>> From<T> for Cell {
    fn from(text: T) -> Self {
        Self::toned(text, Tone::Plain)
    }
}

/// Names come from other machines: what would move the cursor is shown, not done.
pub(super) fn printable(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for char in text.chars() {
        if char.is_control() {
            shown.extend(char.escape_default());
        } else {
            shown.push(char);
        }
    }
    shown
}

impl<'a> Output<'a> {
    pub(super) fn new(out: &'a mut dyn Write, screen: Screen) -> Self {
        Self { out, screen }
    }

    pub(super) fn has_colours(&self) -> bool {
        self.screen.colours
    }

    /// What is shown next takes the place of what is shown: on a terminal the page is wiped, elsewhere a blank line follows.
    pub(super) fn next_page(&mut self) -> Result<(), CliError> {
        let start = match self.screen.width {
            Some(_) => "\x1b[H\x1b[2J",
            None => "\n",
        };
        self.bytes(start.as_bytes())
    }

    /// An output to somewhere else, for the same screen.
    pub(super) fn aside<'b>(&self, out: &'b mut dyn Write) -> Output<'b> {
        Output::new(out, self.screen)
    }

    /// A page, as far as the terminal has lines for it. The last of them says how many more there are.
    pub(super) fn page(&mut self, page: &[u8]) -> Result<(), CliError> {
        let Screen { width, height, .. } = self.screen;
        let lines: Vec<&[u8]> = page.split_inclusive(|byte| *byte == b'\n').collect();
        let heights = || lines.iter().map(move |line| rows(line, width));
        // The cursor takes a line, too.
        let room = height.map_or(usize::MAX, |height| height.saturating_sub(1));
        if heights().sum::<usize>() <= room {
            return self.bytes(page);
        }
        let mut free = room.saturating_sub(1);
        let fits = |rows: &usize| {
            let left = free.checked_sub(*rows);
            free = left.unwrap_or(free);
            left.is_some()
        };
        let shown = heights().take_while(fits).count();
        self.bytes(&lines[..shown].concat())?;
        let more = Counted(lines.len() - shown, "more line");
        let more = self.toned(&format!("… {more}"), Tone::Faint);
        Ok(writeln!(self.out, "{more}")?)
    }

    /// Sentences. On a terminal they go on in more lines, further in than the first.
    pub(super) fn prose(&mut self, text: &str) -> Result<(), CliError> {
        let text = printable(text);
        let words = text.trim_start_matches(' ');
        let first = text.len() - words.len();
        let next = first + BELOW;
        let columns = self.screen.width.unwrap_or(usize::MAX);
        let lines = wrapped(words, columns.saturating_sub(next).max(LEAST_LAST));
        for (number, line) in lines.iter().enumerate() {
            let indent = if number == 0 { first } else { next };
            writeln!(self.out, "{:indent$}{line}", "")?;
        }
        Ok(())
    }

    pub(super) fn line(&mut self, text: &str) -> Result<(), CliError> {
        Ok(writeln!(self.out, "{}", printable(text))?)
    }

    pub(super) fn bytes(&mut self, bytes: &[u8]) -> Result<(), CliError> {
        Ok(self.out.write_all(bytes)?)
    }

    pub(super) fn flush(&mut self) -> Result<(), CliError> {
        Ok(self.out.flush()?)
    }

    /// One document, readable also by people.
    pub(super) fn json<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), CliError> {
        let text = serde_json::to_string_pretty(value)?;
        Ok(writeln!(self.out, "{text}")?)
    }

    /// One of many documents, on a line of its own.
    pub(super) fn json_line<T: Serialize>(&mut self, value: &T) -> Result<(), CliError> {
        let text = serde_json::to_string(value)?;
        Ok(writeln!(self.out, "{text}")?)
    }

    /// Aligned columns, two blanks apart. On a terminal the table fits its width: the last column goes on in more lines; where it has
    /// no room beside the others, its texts stand below their rows. Columns that still are too wide are cut, and those that have no room
    /// even so are left out.
    pub(super) fn table<const N: usize>(
        &mut self,
        header: [&str; N],
        rows: &[[Cell; N]],
    ) -> Result<(), CliError> {
        let mut widths = header.map(length);
        for row in rows {
            for (width, cell) in widths.iter_mut().zip(row) {
                *width = (*width).max(length(&cell.text));
            }
        }
        let last = N - 1;
        let before = |widths: &[usize]| widths.iter().map(|width| width + 2).sum::<usize>();
        let columns = self.screen.width.unwrap_or(usize::MAX);
        let room = columns.saturating_sub(before(&widths[..last]));
        let is_below = room < widths[last].min(LEAST_LAST);
        let (in_row, indent) = if is_below {
            let shown = fit(&mut widths[..last], columns);
            widths[last] = columns.saturating_sub(BELOW).max(LEAST_LAST);
            (shown, BELOW)
        } else {
            widths[last] = widths[last].min(room);
            (N, before(&widths[..last]))
        };
        self.row(&header.map(Cell::from)[..in_row], &widths, &[], indent)?;
        for row in rows {
            let mut texts = wrapped(&row[last].text, widths[last]);
            let mut cells = row.clone();
            if !is_below {
                cells[last].text = texts.remove(0);
            } else if row[last].text.is_empty() {
                texts.clear();
            }
            let below = texts.into_iter().map(|text| (text, row[last].tone));
            let below: Vec<_> = below.collect();
            self.row(&cells[..in_row], &widths, &below, indent)?;
        }
        Ok(())
    }

    fn row(
        &mut self,
        cells: &[Cell],
        widths: &[usize],
        below: &[(String, Tone)],
        indent: usize,
    ) -> Result<(), CliError> {
        let mut line = String::new();
        for (index, (cell, width)) in cells.iter().zip(widths).enumerate() {
            if index > 0 {
                line.push_str("  ");
            }
            let mut text = cell.text.clone();
            if length(&text) > *width {
                text = text.chars().take(width - 1).collect();
                text.push('…');
            }
            let fill = width.saturating_sub(length(&text));
            line.push_str(&self.toned(&text, cell.tone));
            line.extend(std::iter::repeat_n(' ', fill));
        }
        writeln!(self.out, "{}", line.trim_end())?;
        for (text, tone) in below {
            writeln!(self.out, "{:indent$}{}", "", self.toned(text, *tone))?;
        }
        Ok(())
    }

    fn toned(&self, text: &str, tone: Tone) -> String {
        if self.screen.colours && tone != Tone::Plain {
            format!("{}{text}{RESET}", tone.code())
        } else {
            text.to_owned()
        }
    }
}

/// The least width of the last column, and of another one that is cut.
const LEAST_LAST: usize = 20;
const LEAST: usize = 9;

/// How far texts are indented that stand below their row.
const BELOW: usize = 2;

fn length(text: &str) -> usize {
    text.chars().count()
}

/// Takes room from the widest columns until a row is no wider than the terminal, without the last of them if there is no other way.
/// Gives how many there are.
fn fit(widths: &mut [usize], columns: usize) -> usize {
    let wanted = widths.to_vec();
    for shown in (1..=wanted.len()).rev() {
        let widths = &mut widths[..shown];
        widths.copy_from_slice(&wanted[..shown]);
        loop {
            if widths.iter().map(|width| width + 2).sum::<usize>() <= columns + 2 {
                return shown;
            }
            match widths.iter_mut().max().filter(|width| **width > LEAST) {
                Some(width) => *width -= 1,
                None => break,
            }
        }
    }
    wanted.len().min(1)
}

/// The rows that a line takes on a terminal of so many columns, colours left out.
fn rows(line: &[u8], width: Option<usize>) -> usize {
    let line = String::from_utf8_lossy(line);
    let mut parts = line.trim_end_matches('\n').split('\x1b');
    let plain = parts.next().map_or(0, length);
    let after = parts.map(|part| part.split_once('m').map_or(0, |(_, text)| length(text)));
    let columns = plain + after.sum::<usize>();
    width.map_or(1, |width| columns.div_ceil(width.max(1)).max(1))
}

/// A text in lines of at most so many characters, cut at blanks where there are any.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines = Vec::new();
    let mut line = String::new();
    for word in text.split(' ') {
        let mut word: Vec<char> = word.chars().collect();
        loop {
            let blank = usize::from(!line.is_empty());
            let room = width.saturating_sub(length(&line) + blank);
            if word.len() <= room {
                line.extend(std::iter::repeat_n(' ', blank).chain(word));
                break;
            }
            if line.is_empty() {
                line.extend(word.drain(..width));
            }
            lines.push(std::mem::take(&mut line));
        }
    }
    lines.push(line);
    lines
}

/// Milliseconds since 1970.
pub(super) fn now_ms() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    now.map_or(0, |since| since.as_millis() as u64)
}

/// `2026-11-21T15:04:05.678Z`.
pub(super) fn timestamp(ms: u64) -> String {
    let (days, in_day) = (ms / 86_400_000, ms % 86_400_000);
    // Years that begin in March, in eras of 400 of them.
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (year, month) = if month < 10 {
        (year, month + 3)
    } else {
        (year + 1, month - 9)
    };
    let year = era * 400 + year;
    let (seconds, millis) = (in_day / 1000, in_day % 1000);
    format!(
        "{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}.{millis:03}Z",
        seconds / 3600,
        seconds / 60 % 60,
        seconds % 60
    )
}

/// How long whoever reads a line may take until there is room for it.
const ROOM: Duration = Duration::from_millis(200);

/// Writes a line if there is room for it: whoever waits for the end of this command does not wait for its reader.
pub(super) fn write_if_read(fd: BorrowedFd<'_>, line: &[u8]) {
    use rustix::event::{PollFd, PollFlags, Timespec};
    let limit = Timespec::try_from(ROOM).ok();
    let mut fds = [PollFd::new(&fd, PollFlags::OUT)];
    // A pipe with room has a page at least, which is more than a line.
    if rustix::event::poll(&mut fds, limit.as_ref()).is_ok_and(|ready| ready > 0) {
        rustix::io::write(fd, line).ok();
    }
}

/// A message of a failure, in red.
pub(super) fn failure(text: &str, screen: Screen) -> String {
    if screen.message_colours {
        format!("{}{text}{RESET}", Tone::Bad.code())
    } else {
        text.to_owned()
    }
}

/// An age: whole seconds, if it has any.
pub(super) fn human(ms: u64) -> Span {
    let part = if ms < 1000 { 0 } else { ms % 1000 };
    Span(Duration::from_millis(ms - part))
}

#[cfg(test)]
mod tests;
