//! The rank table that a group would get, without starting anything: `kolo plan`.

use serde::Serialize;

use crate::ranks::{
    AssignmentError, MAX_WORLD_SIZE, RankInfo, Registration, RegistrationError, host_assignments,
};
use kolo_transport::ids::Rank;

/// One member of the planned group. Serialises with these field names in this order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PlanRow {
    /// Its host.
    pub host: String,
    /// World rank.
    pub rank: u32,
    /// Members in all.
    pub size: u32,
    /// Number on its host.
    pub local_rank: u32,
    /// Members on its host.
    pub local_size: u32,
    /// Number of its host among those that have its local rank.
    pub cross_rank: u32,
    /// Number of hosts that have its local rank.
    pub cross_size: u32,
}

impl<K> From<&RankInfo<K>> for PlanRow {
    fn from(info: &RankInfo<K>) -> Self {
        Self {
            host: info.hostname.clone(),
            rank: info.rank.0,
            size: info.size,
            local_rank: info.local_rank.0,
            local_size: info.local_size,
            cross_rank: info.cross_rank.0,
            cross_size: info.cross_size,
        }
    }
}

/// Why there is no plan.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The list can't be read. Write it as the message says.
    #[error("`{entry}` (entry {position} of `{given}`) {problem}; expected {expected}")]
    Syntax {
        /// The whole list.
        given: String,
        /// The entry that is wrong.
        entry: String,
        /// Its number, from 1.
        position: usize,
        /// What is wrong with it.
        problem: &'static str,
        /// What is allowed.
        expected: &'static str,
    },
    /// The list is well written, and can't hold what is asked for.
    #[error(transparent)]
    Assignment(#[from] AssignmentError),
    /// The registered hosts can't be ranked.
    #[error(transparent)]
    Registration(#[from] RegistrationError),
}

impl PlanError {
    /// Whether what is asked for can't be placed, as opposed to: can't be read.
    #[must_use]
    pub fn is_unplaceable(&self) -> bool {
        !matches!(self, Self::Syntax { .. })
    }
}

const REGISTRATION_FORM: &str = "HOST,HOST,... in rank order, like `a,b,a,c`";

fn is_host(text: &str) -> bool {
    if let Some(inner) = text
        .strip_prefix('[')
        .and_then(|rest| rest.strip_suffix(']'))
    {
        return inner.parse::<std::net::Ipv6Addr>().is_ok();
    }
    !text.is_empty()
        && text
            .chars()
            .all(|c| c.is_alphanumeric() || matches!(c, '_' | '.' | '-'))
}

fn entries(given: &str) -> impl Iterator<Item = (usize, &str)> {
    (1..).zip(given.split(',').map(str::trim))
}

/// Reads `a,b,a,c`: the host of every rank, in rank order.
///
/// # Errors
///
/// [`PlanError::Syntax`].
pub fn parse_registration(given: &str) -> Result<Vec<String>, PlanError> {
    entries(given)
        .map(|(position, entry)| {
            let wrong = |problem| PlanError::Syntax {
                given: given.to_owned(),
                entry: entry.to_owned(),
                position,
                problem,
                expected: REGISTRATION_FORM,
            };
            match entry {
                "" => Err(wrong("is empty")),
                host if is_host(host) => Ok(host.to_owned()),
                _ => Err(wrong("is neither a name nor an address")),
            }
        })
        .collect()
}

/// The table for hosts with slots. Without `max` all slots are filled; without `min` one worker is enough.
///
/// # Errors
///
/// [`PlanError::Assignment`] if the slots do not suffice.
pub fn plan_hosts(
    hosts: &[(String, u32)],
    min: Option<u32>,
    max: Option<u32>,
) -> Result<Vec<PlanRow>, PlanError> {
    let infos = host_assignments(hosts, min.unwrap_or(1), max)?;
    Ok(infos.iter().map(PlanRow::from).collect())
}

/// The table for members that register from these hosts, the first with rank 0.
///
/// # Errors
///
/// [`PlanError`].
pub fn plan_registration(given: &str) -> Result<Vec<PlanRow>, PlanError> {
    plan_ranks(&parse_registration(given)?)
}

/// The table for members on these hosts, in rank order.
///
/// # Errors
///
/// [`PlanError::Registration`].
pub fn plan_ranks(hosts: &[String]) -> Result<Vec<PlanRow>, PlanError> {
    if hosts.len() > MAX_WORLD_SIZE as usize {
        return Err(RegistrationError::TooLarge.into());
    }
    let mut registration = Registration::new();
    for (rank, host) in (0..).map(Rank).zip(hosts) {
        registration.register(host.as_str(), host, rank)?;
    }
    Ok(registration.finalize()?.iter().map(PlanRow::from).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hosts(given: &[(&str, u32)]) -> Vec<(String, u32)> {
        given
            .iter()
            .map(|(host, slots)| ((*host).to_owned(), *slots))
            .collect()
    }

    #[test]
    fn a_plan_in_json_has_the_fields_in_order() {
        let three = hosts(&[("a", 2), ("b", 1), ("c", 3)]);
        let rows = plan_hosts(&three, Some(2), Some(4)).unwrap();
        assert_eq!(
            serde_json::to_string(&rows[3]).unwrap(),
            r#"{"host":"c","rank":3,"size":4,"local_rank":0,"local_size":1,"cross_rank":2,"cross_size":3}"#
        );
        assert_eq!(rows.len(), 4);
        assert_eq!(plan_hosts(&three, None, None).unwrap().len(), 6);
    }

    #[test]
    fn a_registration_may_interleave() {
        let rows = plan_registration("a,b,a,c").unwrap();
        let values: Vec<_> = rows
            .iter()
            .map(|r| {
                (
                    r.host.as_str(),
                    r.local_rank,
                    r.local_size,
                    r.cross_rank,
                    r.cross_size,
                )
            })
            .collect();
        assert_eq!(
            values,
            [
                ("a", 0, 2, 0, 3),
                ("b", 0, 1, 1, 3),
                ("a", 1, 2, 0, 1),
                ("c", 0, 1, 2, 3)
            ]
        );
    }

    #[test]
    fn what_can_not_be_placed_names_requested_and_available() {
        let error = plan_hosts(&hosts(&[("a", 2), ("b", 1)]), Some(4), None).unwrap_err();
        assert!(error.is_unplaceable());
        assert_eq!(
            error.to_string(),
            "requested at least 4 workers, available are 3 slots on 2 hosts"
        );
        for given in [&[("a", 0)][..], &[("a", 2), ("a", 2)]] {
            assert!(
                plan_hosts(&hosts(given), None, None)
                    .unwrap_err()
                    .is_unplaceable()
            );
        }
    }

    #[test]
    fn bad_lists_say_which_entry_is_wrong_and_what_is_allowed() {
        for given in ["", "a,,b", "a:2", "a b"] {
            let error = plan_registration(given).unwrap_err();
            assert!(!error.is_unplaceable(), "{given}");
            assert!(error.to_string().ends_with("like `a,b,a,c`"), "{error}");
        }
    }

    #[test]
    fn ranks_are_planned_for_hosts_that_no_list_could_hold() {
        let rows = plan_ranks(&["fd00::2".to_owned(), "fd00::2".to_owned()]).unwrap();
        assert_eq!((rows[1].host.as_str(), rows[1].local_rank), ("fd00::2", 1));
    }
}
