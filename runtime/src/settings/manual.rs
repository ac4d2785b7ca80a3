//! Manual pages, from what the help of a command says.

use std::io::{self, Write as _};

use clap::Command;
use clap_mangen::Man;

/// How apostrophes are set, with which all that `roff` writes begins.
const APOSTROPHES: &str = ".ie \\n(.g .ds Aq \\(aq\n.el .ds Aq '\n";

/// The page of a command, which was built: options, then what stands behind them in the help, section by section.
///
/// # Errors
///
/// None that a buffer in memory gives.
pub(crate) fn page(command: &Command, section: &str, also: &[String]) -> io::Result<String> {
    let name = name(command);
    let usage = command.clone().render_usage().to_string();
    let usage = escaped(usage.trim_start_matches("Usage: "));
    let notes = command
        .get_after_help()
        .map_or_else(String::new, ToString::to_string);
    let version = env!("CARGO_PKG_VERSION");
    let man = Man::new(command.clone());
    let mut out = Vec::new();
    writeln!(
        out,
        ".TH \"{name}\" \"{section}\" \"\" \"kolo {version}\" \"kolo\""
    )?;
    man.render_name_section(&mut out)?;
    writeln!(out, ".SH SYNOPSIS\n{usage}")?;
    man.render_description_section(&mut out)?;
    let (prose, sections) = divided(&notes);
    for paragraph in prose {
        writeln!(out, ".PP\n{}", escaped(paragraph))?;
    }
    man.render_options_section(&mut out)?;
    if command.has_subcommands() {
        man.render_subcommands_section(&mut out)?;
    }
    for (title, lines) in sections {
        writeln!(out, ".SH \"{}\"", title.to_uppercase())?;
        out.write_all(body(title, &lines).as_bytes())?;
    }
    if !also.is_empty() {
        let pages: Vec<String> = also.iter().map(|page| format!("\\fB{page}\\fR")).collect();
        writeln!(out, ".SH \"SEE ALSO\"\n{}", pages.join(", "))?;
    }
    let text = String::from_utf8_lossy(&out).replace(APOSTROPHES, "");
    let lines: String = text.lines().map(in_bold).collect();
    Ok(format!("{APOSTROPHES}{lines}"))
}

/// What a page is called: `kolo-token-create`.
pub(crate) fn name(command: &Command) -> String {
    let name = command.get_display_name();
    name.unwrap_or_else(|| command.get_name()).to_owned()
}

/// The paragraphs of a text, and its sections: a heading that ends with `:`, and indented lines.
fn divided(text: &str) -> (Vec<&str>, Vec<(&str, Vec<&str>)>) {
    let (mut prose, mut sections) = (Vec::new(), Vec::<(&str, Vec<&str>)>::new());
    for line in text.lines() {
        match (line.strip_suffix(':'), sections.last_mut()) {
            (Some(title), _) if !line.starts_with(' ') => {
                sections.push((title, Vec::new()));
            }
            (_, Some((_, lines))) if line.is_empty() || line.starts_with(' ') => {
                lines.push(line.trim_start());
            }
            _ if line.is_empty() => {}
            _ => prose.push(line),
        }
    }
    (prose, sections)
}

/// Commands as they are typed; elsewhere words, and what they mean.
fn body(title: &str, lines: &[&str]) -> String {
    if title == "Examples" {
        let lines: Vec<String> = lines.iter().map(|line| escaped(line)).collect();
        return format!(".nf\n{}\n.fi\n", lines.join("\n").trim_end());
    }
    let entry = |line: &&str| match line.split_once("  ") {
        Some((word, meaning)) => {
            let (word, meaning) = (escaped(word), escaped(meaning.trim_start()));
            format!(".TP\n\\fB{word}\\fR\n{meaning}\n")
        }
        None if line.is_empty() => String::new(),
        None => format!("{}\n", escaped(line)),
    };
    lines.iter().map(entry).collect()
}

fn escaped(text: &str) -> String {
    let text = text.replace('\\', "\\e").replace('-', "\\-");
    // These begin a request of the formatter.
    if text.starts_with(['.', '\'']) {
        return format!("\\&{text}");
    }
    text
}

/// Words between back quotes are set in bold.
fn in_bold(line: &str) -> String {
    let mut parts = line.split('`');
    let mut set = parts.next().unwrap_or_default().to_owned();
    for (index, part) in parts.enumerate() {
        set.push_str(if index % 2 == 0 { "\\fB" } else { "\\fR" });
        set.push_str(part);
    }
    set + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_stands_behind_the_options_is_in_sections() {
        let mut command = Command::new("kolo-x").about("Do it").after_help(
            "Ask `kolo help`.\n\nExit codes:\n  0    done\n  128+N  signal N\n\nExamples:\n  kolo x\n\n  # Again\n  kolo x --y 'a\\b'",
        );
        command.build();
        let page = page(&command, "8", &["kolo(1)".to_owned()]).unwrap();
        for part in [
            ".el .ds Aq '\n.TH \"kolo-x\" \"8\" \"\" \"kolo ",
            ".SH SYNOPSIS\nkolo\\-x\n",
            ".PP\nAsk \\fBkolo help\\fR.\n",
            ".SH \"EXIT CODES\"\n.TP\n\\fB0\\fR\ndone\n.TP\n\\fB128+N\\fR\nsignal N\n",
            ".SH \"EXAMPLES\"\n.nf\nkolo x\n\n# Again\nkolo x \\-\\-y 'a\\eb'\n.fi\n",
            ".SH \"SEE ALSO\"\n\\fBkolo(1)\\fR\n",
        ] {
            assert!(page.contains(part), "{part} is not in\n{page}");
        }
    }
}
