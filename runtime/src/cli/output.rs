//! Tables, times, colours and JSON.

use std::io::Write;

use serde::Serialize;

use super::error::CliError;

/// Where results go.
pub(super) struct Output<'a> {
    out: &'a mut dyn Write,
    colours: bool,
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
            Self::Bad => "\x1b[31m",
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
    pub(super) fn new(out: &'a mut dyn Write, colours: bool) -> Self {
        Self { out, colours }
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

    /// Aligned columns, two blanks apart. The last one is not filled up.
    pub(super) fn table<const N: usize>(
        &mut self,
        header: [&str; N],
        rows: &[[Cell; N]],
    ) -> Result<(), CliError> {
        let mut widths = header.map(|name| name.chars().count());
        for row in rows {
            for (width, cell) in widths.iter_mut().zip(row) {
                *width = (*width).max(cell.text.chars().count());
            }
        }
        self.row(&header.map(Cell::from), &widths)?;
        for row in rows {
            self.row(row, &widths)?;
        }
        Ok(())
    }

    fn row(&mut self, cells: &[Cell], widths: &[usize]) -> Result<(), CliError> {
        let mut line = String::new();
        for (index, (cell, width)) in cells.iter().zip(widths).enumerate() {
            if index > 0 {
                line.push_str("  ");
            }
            let fill = width - cell.text.chars().count();
            if self.colours && cell.tone != Tone::Plain {
                line.push_str(cell.tone.code());
                line.push_str(&cell.text);
                line.push_str("\x1b[0m");
            } else {
                line.push_str(&cell.text);
            }
            line.extend(std::iter::repeat_n(' ', fill));
        }
        Ok(writeln!(self.out, "{}", line.trim_end())?)
    }
}

/// A time as people say it: `350ms`, `12s`, `3m 12s`, `5h 3m`, `2d 4h`.
pub(super) fn human(ms: u64) -> String {
    let seconds = ms / 1000;
    let pair = |unit: u64, name: &str, part: u64, part_name: &str| {
        format!(
            "{}{name} {}{part_name}",
            seconds / unit,
            seconds % unit / part
        )
    };
    match seconds {
        0 => format!("{ms}ms"),
        1..60 => format!("{seconds}s"),
        60..3600 => pair(60, "m", 1, "s"),
        3600..86400 => pair(3600, "h", 60, "m"),
        _ => pair(86400, "d", 3600, "h"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(colours: bool) -> String {
        let mut bytes = Vec::new();
        let mut output = Output::new(&mut bytes, colours);
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
        output.table(["NODE", "STATE", "N"], &rows).unwrap();
        String::from_utf8(bytes).unwrap()
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
    fn times_are_told_in_two_units_at_most() {
        for (ms, text) in [
            (0, "0ms"),
            (999, "999ms"),
            (1000, "1s"),
            (59_999, "59s"),
            (192_000, "3m 12s"),
            (3_600_000, "1h 0m"),
            (18_180_000, "5h 3m"),
            (187_200_000, "2d 4h"),
        ] {
            assert_eq!(human(ms), text);
        }
    }
}
