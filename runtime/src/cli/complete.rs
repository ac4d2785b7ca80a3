//! `kolo completions` and `kolo man`: what shells and `man` need to know of the command line.

use clap::CommandFactory as _;

use super::args::{Args, Completions, Man, Shell};
use super::error::CliError;
use super::output::Output;

pub(super) fn completions(options: &Completions, out: &mut Output<'_>) -> Result<(), CliError> {
    let shell = match options.shell {
        Shell::Bash => clap_complete::Shell::Bash,
        Shell::Zsh => clap_complete::Shell::Zsh,
        Shell::Fish => clap_complete::Shell::Fish,
    };
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Args::command(), "kolo", &mut script);
    out.bytes(&script)
}

pub(super) fn manual(options: &Man, out: &mut Output<'_>) -> Result<(), CliError> {
    let dir = &options.dir;
    let failed = |error| CliError::File {
        path: dir.clone(),
        error,
    };
    std::fs::create_dir_all(dir).map_err(failed)?;
    clap_mangen::generate_to(Args::command(), dir).map_err(failed)?;
    out.line(&format!(
        "the pages are in {}; `man {}` shows the first",
        dir.display(),
        dir.join("kolo.1").display()
    ))
}

#[cfg(test)]
mod tests {
    use super::super::output::Screen;
    use super::*;

    #[test]
    fn every_shell_and_every_command_is_served() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let mut script = Vec::new();
            let mut out = Output::new(&mut script, Screen::default());
            completions(&Completions { shell }, &mut out).unwrap();
            let script = String::from_utf8(script).unwrap();
            for word in ["interfaces", "drain", "nproc-per-node"] {
                assert!(script.contains(word), "{shell:?} does not know {word}");
            }
        }
        let dir = tempfile::tempdir().unwrap();
        let man = Man {
            dir: dir.path().join("man1"),
        };
        manual(&man, &mut Output::new(&mut Vec::new(), Screen::default())).unwrap();
        for page in ["kolo.1", "kolo-run.1", "kolo-node-drain.1"] {
            let text = std::fs::read_to_string(man.dir.join(page)).unwrap();
            assert!(text.contains(".TH"), "{page}");
        }
    }
}
