//! The rank table that a group would get, without starting anything: `kolo plan`.

use serde::Serialize;

use crate::ranks::{
    AssignmentError, MAX_WORLD_SIZE, RankInfo, Registration, RegistrationError, host_assignments,
};
use kolo_wire::ids::Rank;

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
    /// The slots can't hold what is asked for.
    #[error(transparent)]
    Assignment(#[from] AssignmentError),
    /// The registered hosts can't be ranked.
    #[error(transparent)]
    Registration(#[from] RegistrationError),
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

/// The table for members on these hosts, in rank order. `K` tells hosts apart, whatever they are called.
///
/// # Errors
///
/// [`PlanError::Registration`].
pub fn plan_ranks<K: Clone + Ord>(
    hosts: impl ExactSizeIterator<Item = (K, String)>,
) -> Result<Vec<PlanRow>, PlanError> {
    if hosts.len() > MAX_WORLD_SIZE as usize {
        return Err(RegistrationError::TooLarge.into());
    }
    let mut registration = Registration::new();
    for (rank, (key, host)) in (0..).map(Rank).zip(hosts) {
        registration.register(key, &host, rank)?;
    }
    Ok(registration.finalize()?.iter().map(PlanRow::from).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_in_json_has_the_fields_in_order() {
        let three = [("a", 2), ("b", 1), ("c", 3)].map(|(host, slots)| (host.to_owned(), slots));
        let rows = plan_hosts(&three, Some(2), Some(4)).unwrap();
        let json = r#"{"host":"c","rank":3,"size":4,"local_rank":0,"local_size":1,"cross_rank":2,"cross_size":3}"#;
        assert_eq!(serde_json::to_string(&rows[3]).unwrap(), json);
        assert_eq!(rows.len(), 4);
        assert_eq!(plan_hosts(&three, None, None).unwrap().len(), 6);
    }

    #[test]
    fn two_hosts_of_one_name_are_two() {
        let hosts = [(1, "a"), (2, "a"), (1, "a")].map(|(id, name)| (id, name.to_owned()));
        let rows = plan_ranks(hosts.into_iter()).unwrap();
        let sizes: Vec<_> = rows.iter().map(|row| row.local_size).collect();
        assert_eq!(sizes, [2, 1, 2]);
        assert_eq!((rows[2].local_rank, rows[1].cross_rank), (1, 1));
    }
}
