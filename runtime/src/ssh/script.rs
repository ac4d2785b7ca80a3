//! What the shell of a host is told to do before `kolo-node` takes over.
//!
//! The command that ssh runs is [`REMOTE_COMMAND`] and nothing else: it means the same to every login shell, and nothing
//! that was given by anybody stands on a command line. The script follows on standard input. All of it is one function, so
//! that the shell has read it to the end before anything in it reads standard input.

use std::fmt::Write as _;

/// What ssh runs on the host.
pub(super) const REMOTE_COMMAND: &str = "exec /bin/sh";

/// Starts every line that is meant for the launcher; login shells may print others.
pub(super) const MARK: &str = "kolo-up/1 ";

/// The name under which a program of this content is kept on a host.
pub(super) fn cached_name(version: &str, sha256: &str) -> String {
    format!("kolo-node-{version}-{}", sha256.get(..32).unwrap_or(sha256))
}

/// `text` as one word of a POSIX shell, whatever is in it.
pub(crate) fn quote(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len() + 2);
    quoted.push('\'');
    for char in text.chars() {
        match char {
            '\'' => quoted.push_str("'\\''"),
            // No path, name or address has one, and no shell can hold it.
            '\0' => {}
            other => quoted.push(other),
        }
    }
    quoted.push('\'');
    quoted
}

/// Which program the host is to run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Program<'a> {
    /// It is there already.
    There(&'a str),
    /// It is sent if it is not in the user's cache on the host.
    Sent {
        /// See [`cached_name`].
        name: &'a str,
        size: u64,
        sha256: &'a str,
        /// Makes the name of the unfinished file unique, also where several hosts share a home folder.
        nonce: &'a str,
    },
}

/// The script for one host. It prints lines that [`Answer`](super::protocol::Answer) reads.
pub(super) fn script(program: &Program<'_>) -> String {
    let mut script = String::from(PROLOGUE);
    match program {
        Program::There(path) => {
            let _ = writeln!(script, "  node={}", quote(path));
        }
        Program::Sent {
            name,
            size,
            sha256,
            nonce,
        } => {
            let _ = write!(
                script,
                "  name={}\n  size={size}\n  sum={}\n  nonce={}\n{CACHE}",
                quote(name),
                quote(sha256),
                quote(nonce)
            );
        }
    }
    script.push_str(EPILOGUE);
    script
}

const PROLOGUE: &str = r#"
kolo_say() { printf 'kolo-up/1 %s\n' "$*"; }
kolo_fail() { kolo_say "$@"; exit 1; }
kolo_line() { printf %s "$1" | tr '\n\r' '  '; }
kolo_whole() {
  [ -f "$1" ] || return 1
  [ "$(wc -c <"$1" | tr -d ' ')" = "$size" ] || return 1
  command -v sha256sum >/dev/null 2>&1 || return 0
  [ "$(sha256sum <"$1" | cut -d ' ' -f 1)" = "$sum" ]
}
kolo_main() {
  umask 077
  from=${SSH_CONNECTION:-none}
  kolo_say hello "$(uname -s)" "$(uname -m)" "${from%% *}"
"#;

// `mv` within one folder is atomic, so two launchers that send at once do no harm, and none sees half a program.
const CACHE: &str = r#"
  if [ -n "${XDG_CACHE_HOME:-}" ]; then cache=$XDG_CACHE_HOME/kolo/bin
  elif [ -n "${HOME:-}" ]; then cache=$HOME/.cache/kolo/bin
  else kolo_fail cannot-store "the user has no home folder there"
  fi
  node=$cache/$name
  if kolo_whole "$node"; then
    touch "$node" 2>/dev/null
    kolo_say have
  else
    why=$(mkdir -p "$cache" 2>&1) || kolo_fail cannot-store "$(kolo_line "$why")"
    part=$cache/.part-$nonce
    trap 'rm -f "$part"' EXIT
    trap 'exit 1' HUP INT TERM
    kolo_say need
    why=$( { head -c "$size" >"$part"; } 2>&1) || kolo_fail cannot-store "$(kolo_line "$why")"
    kolo_whole "$part" || kolo_fail cannot-store "what arrived in $part is not what was sent"
    why=$( { chmod 700 "$part" && mv -f "$part" "$node"; } 2>&1) || kolo_fail cannot-store "$(kolo_line "$why")"
    find "$cache" -type f -mtime +30 -exec rm -f {} + 2>/dev/null
    trap - EXIT HUP INT TERM
    kolo_say stored
  fi
"#;

const EPILOGUE: &str = r#"
  version=$("$node" --version 2>&1 </dev/null)
  code=$?
  [ "$code" = 0 ] || kolo_fail cannot-run "$code" "$(kolo_line "$version")"
  kolo_say version "$(kolo_line "$version")"
  exec "$node" launched
}
kolo_main
"#;

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader, Write as _};
    use std::process::{Command, Stdio};

    use super::*;

    const NASTY: [&str; 9] = [
        "plain",
        "with blank",
        "it's",
        "\"double\"",
        "$(touch /tmp/kolo-pwned)",
        "`id`",
        "a;b|c&d>e",
        "-n",
        "line\nbreak \\ * ? ~ ! # ünï",
    ];

    /// Runs a script as a host does: the program when it is asked for, the order when it is `kolo-node`'s turn.
    fn run(env: &[(&str, &str)], script: &str, program: &[u8], order: &[u8]) -> Vec<String> {
        let mut child = Command::new("/bin/sh")
            .env_remove("XDG_CACHE_HOME")
            .env("SSH_CONNECTION", "10.0.0.9 4 10.0.0.1 22")
            .envs(env.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stdin = child.stdin.take();
        let mut send = |bytes: &[u8], last: bool| {
            if let Some(pipe) = &mut stdin {
                // It may have ended.
                pipe.write_all(bytes).ok();
            }
            if last {
                stdin = None;
            }
        };
        send(script.as_bytes(), false);
        let mut said = Vec::new();
        for line in BufReader::new(child.stdout.take().unwrap()).lines() {
            let line = line.unwrap();
            let line = line.strip_prefix(MARK).unwrap_or(&line).to_owned();
            match line.split(' ').next() {
                // What is cut off ends there.
                Some("need") => send(program, order.is_empty()),
                Some("version") => send(order, true),
                _ => {}
            }
            said.push(line);
        }
        child.wait().unwrap();
        said
    }

    fn sha256(bytes: &[u8]) -> String {
        super::super::binary::sha256(bytes)
    }

    #[test]
    fn a_quoted_text_is_one_word_for_the_shell() {
        for text in NASTY {
            let output = Command::new("/bin/sh")
                .arg("-c")
                .arg(format!("printf '[%s]' {}", quote(text)))
                .output()
                .unwrap();
            assert_eq!(
                String::from_utf8(output.stdout).unwrap(),
                format!("[{text}]")
            );
        }
        assert_eq!(quote("a\0b"), "'ab'");
    }

    #[test]
    fn a_program_is_stored_once_and_then_found_whatever_the_folder_is_called() {
        let program = b"#!/bin/sh\n[ \"$1\" = launched ] && { read -r line; echo \"got $line\"; exit 0; }\necho fake 1\n";
        let sum = sha256(program);
        for text in NASTY {
            let dir = tempfile::tempdir().unwrap();
            let home = dir.path().join(text);
            let env = [("HOME", home.to_str().unwrap())];
            let script = script(&Program::Sent {
                name: "kolo-node-1",
                size: program.len() as u64,
                sha256: &sum,
                nonce: "1",
            });
            let said = run(&env, &script, program, b"order\n");
            assert!(said[0].starts_with("hello Linux "), "{text}: {said:?}");
            assert!(said[0].ends_with(" 10.0.0.9"), "{said:?}");
            assert_eq!(
                said[1..],
                ["need", "stored", "version fake 1", "got order"],
                "{text}"
            );
            let cache = home.join(".cache/kolo/bin");
            assert_eq!(std::fs::read_dir(&cache).unwrap().count(), 1, "{text}");
            // This time only what follows is sent, and none of it is lost.
            let said = run(&env, &script, program, b"order 2\n");
            assert_eq!(
                said[1..],
                ["have", "version fake 1", "got order 2"],
                "{text}"
            );
        }
        assert!(!std::path::Path::new("/tmp/kolo-pwned").exists());
    }

    #[test]
    fn what_is_cut_off_or_changed_is_not_kept() {
        let program = b"#!/bin/sh\necho fake 1\n";
        let sum = sha256(program);
        let dir = tempfile::tempdir().unwrap();
        let env = [("XDG_CACHE_HOME", dir.path().to_str().unwrap())];
        let sent = Program::Sent {
            name: "n",
            size: program.len() as u64,
            sha256: &sum,
            nonce: "2",
        };
        let cache = dir.path().join("kolo/bin");
        for bytes in [&program[..5], b"#!/bin/sh\necho evil 1\n"] {
            let said = run(&env, &script(&sent), bytes, b"");
            assert_eq!(said[1], "need");
            assert!(said[2].starts_with("cannot-store what arrived"), "{said:?}");
            assert_eq!(std::fs::read_dir(&cache).unwrap().count(), 0);
        }
        // A file of the right name and size with other content is not believed.
        std::fs::write(cache.join("n"), b"#!/bin/sh\necho evil 1\n").unwrap();
        let said = run(&env, &script(&sent), program, b"");
        assert_eq!(said[1..4], ["need", "stored", "version fake 1"]);
    }

    #[test]
    fn what_can_not_run_or_be_stored_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("it's $(here)");
        let there = path.to_str().unwrap();
        let said = run(&[], &script(&Program::There(there)), b"", b"");
        assert!(said[1].starts_with("cannot-run 127 "), "{said:?}");
        std::fs::write(&path, "not executable").unwrap();
        let said = run(&[], &script(&Program::There(there)), b"", b"");
        assert!(said[1].starts_with("cannot-run 126 "), "{said:?}");
        let sent = Program::Sent {
            name: "n",
            size: 1,
            sha256: "",
            nonce: "3",
        };
        let said = run(&[("HOME", "/proc/none")], &script(&sent), b"", b"");
        assert!(said[1].starts_with("cannot-store mkdir"), "{said:?}");
        let said = run(&[("HOME", "")], &script(&sent), b"", b"");
        assert_eq!(said[1], "cannot-store the user has no home folder there");
    }
}
