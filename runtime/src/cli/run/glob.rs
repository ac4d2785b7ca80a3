//! Names of environment variables by pattern: `*` is any text, `?` any character.

/// Whether the whole name matches.
pub(crate) fn matches(pattern: &str, name: &str) -> bool {
    let (pattern, name): (Vec<char>, Vec<char>) =
        (pattern.chars().collect(), name.chars().collect());
    let (mut at, mut from) = (0, 0);
    // Where to go back to: behind the last star, with one character more in it.
    let mut star: Option<(usize, usize)> = None;
    while from < name.len() {
        match pattern.get(at) {
            Some('*') => {
                star = Some((at + 1, from));
                at += 1;
            }
            Some(wanted) if *wanted == '?' || *wanted == name[from] => {
                at += 1;
                from += 1;
            }
            _ => match star {
                Some((behind, eaten)) => {
                    star = Some((behind, eaten + 1));
                    (at, from) = (behind, eaten + 1);
                }
                None => return false,
            },
        }
    }
    pattern[at..].iter().all(|left| *left == '*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stars_and_question_marks() {
        for (pattern, name) in [
            ("NCCL_*", "NCCL_DEBUG"),
            ("*", ""),
            ("*", "X"),
            ("A?C", "ABC"),
            ("*_PATH", "LD_LIBRARY_PATH"),
            ("*A*A*", "xAyAz"),
            ("EXACT", "EXACT"),
            ("**", "abc"),
        ] {
            assert!(matches(pattern, name), "{pattern} {name}");
        }
        for (pattern, name) in [
            ("NCCL_*", "XNCCL_A"),
            ("A?C", "AC"),
            ("", "A"),
            ("EXACT", "EXACTLY"),
            ("*A", "AB"),
            ("a", "A"),
        ] {
            assert!(!matches(pattern, name), "{pattern} {name}");
        }
        assert!(!matches(&"*a".repeat(30), &"b".repeat(10_000)), "in time");
    }
}
