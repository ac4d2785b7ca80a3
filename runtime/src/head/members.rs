//! Who administers the cluster, and who was put out of it. Pure; serialized into the head's durable state.

use std::collections::BTreeSet;

use kolo_transport::Identity;
use kolo_transport::authority::DEFAULT_VALIDITY;
use kolo_transport::identity::Role;
use kolo_transport::ids::{DriverId, NodeId};
use kolo_transport::wire::{Refusal, RefusalKind, RevokedMember};
use serde::{Deserialize, Serialize};

/// The most members that are out at one time: their list must fit into a frame.
pub(super) const MAX_REVOKED: usize = 8192;

/// The most administrators.
const MAX_ADMINISTRATORS: usize = 1024;

/// Longest reason, in bytes.
const MAX_REASON: usize = 200;

/// No certificate lives longer than this (see `HeadConfig::check`), so that nobody has one who was put out before that.
const FORGET_AFTER: u64 = DEFAULT_VALIDITY.as_secs() + 24 * 3600;

/// The members of which the head knows more than that they have a certificate.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Members {
    #[serde(default)]
    administrators: BTreeSet<String>,
    #[serde(default)]
    revoked: Vec<RevokedMember>,
}

fn invalid(message: String) -> Refusal {
    Refusal::new(RefusalKind::Invalid, message)
}

fn check(role: Role, name: &str) -> Result<(), Refusal> {
    let known = match role {
        Role::Node => name.parse::<NodeId>().is_ok(),
        Role::Driver => name.parse::<DriverId>().is_ok(),
        Role::Head | Role::Worker => false,
    };
    if known {
        Ok(())
    } else {
        Err(invalid(format!(
            "`{}` is not the id of a node (`node-` and 16 hexadecimal digits) or a driver (`driver-` and 16 hexadecimal digits)",
            name.chars().take(100).collect::<String>().escape_debug()
        )))
    }
}

impl Members {
    /// Whether a driver may make tokens and put members out.
    pub(super) fn is_administrator(&self, driver: &str) -> bool {
        self.administrators.contains(driver)
    }

    /// Why there can't be one more administrator.
    pub(super) fn room_for_administrator(&self) -> Result<(), Refusal> {
        if self.administrators.len() < MAX_ADMINISTRATORS {
            return Ok(());
        }
        Err(Refusal::new(
            RefusalKind::TooLarge,
            format!(
                "there are {MAX_ADMINISTRATORS} administrators, which is the most; put those out by `kolo revoke` who are not \
                 needed any more, then log in again with the same token"
            ),
        ))
    }

    /// False if it was one already, or there are too many.
    pub(super) fn add_administrator(&mut self, driver: &str) -> bool {
        self.administrators.len() < MAX_ADMINISTRATORS
            && self.administrators.insert(driver.to_owned())
    }

    pub(super) fn is_revoked(&self, member: &Identity) -> bool {
        self.find(member.role, &member.name).is_some()
    }

    fn find(&self, role: Role, name: &str) -> Option<usize> {
        self.revoked
            .iter()
            .position(|member| member.role == role && member.name == name)
    }

    /// All that are out, in the order in which they were put out.
    pub(super) fn revoked(&self) -> &[RevokedMember] {
        &self.revoked
    }

    /// Puts a node or driver out. One that is out already stays so, with its first reason.
    pub(super) fn revoke(
        &mut self,
        role: Role,
        name: &str,
        reason: &str,
        now_unix: u64,
    ) -> Result<(), Refusal> {
        check(role, name)?;
        if reason.len() > MAX_REASON || reason.chars().any(char::is_control) {
            return Err(invalid(format!(
                "the reason has {} bytes; allowed are {MAX_REASON} without control characters",
                reason.len()
            )));
        }
        self.forget(now_unix);
        self.administrators.remove(name);
        if self.find(role, name).is_some() {
            return Ok(());
        }
        if self.revoked.len() >= MAX_REVOKED {
            return Err(Refusal::new(
                RefusalKind::TooLarge,
                format!(
                    "{MAX_REVOKED} members are out, which is the most; let some in again, or make a new cluster with a new \
                     authority"
                ),
            ));
        }
        self.revoked.push(RevokedMember {
            role,
            name: name.to_owned(),
            since_unix: now_unix,
            reason: reason.to_owned(),
        });
        Ok(())
    }

    /// Lets one in again. Not as an administrator.
    pub(super) fn reinstate(&mut self, role: Role, name: &str) -> Result<(), Refusal> {
        check(role, name)?;
        let index = self.find(role, name).ok_or_else(|| {
            Refusal::new(
                RefusalKind::NotFound,
                format!("{name} is not revoked; `kolo status` lists those that are"),
            )
        })?;
        self.revoked.remove(index);
        Ok(())
    }

    /// Forgets those whose last certificate has ended.
    fn forget(&mut self, now_unix: u64) {
        self.revoked
            .retain(|member| now_unix < member.since_unix.saturating_add(FORGET_AFTER));
    }
}

#[cfg(test)]
mod tests {
    use kolo_transport::ids::ClusterId;

    use super::*;

    const NODE: &str = "node-00000000000000ab";
    const DRIVER: &str = "driver-00000000000000cd";

    fn identity(role: Role, name: &str) -> Identity {
        Identity::new(ClusterId(1), role, name).unwrap()
    }

    #[test]
    fn who_is_out_is_out_until_let_in_again_and_is_no_administrator_any_more() {
        let mut members = Members::default();
        assert!(members.add_administrator(DRIVER));
        assert!(!members.add_administrator(DRIVER));
        members.revoke(Role::Driver, DRIVER, "lost", 10).unwrap();
        members.revoke(Role::Driver, DRIVER, "again", 11).unwrap();
        members.revoke(Role::Node, NODE, "", 12).unwrap();
        assert!(members.is_revoked(&identity(Role::Driver, DRIVER)));
        assert!(members.is_revoked(&identity(Role::Node, NODE)));
        assert!(!members.is_revoked(&identity(Role::Node, "node-00000000000000ac")));
        assert!(!members.is_administrator(DRIVER));
        assert_eq!(members.revoked()[0].reason, "lost");
        assert_eq!(members.revoked().len(), 2);
        members.reinstate(Role::Driver, DRIVER).unwrap();
        assert!(!members.is_revoked(&identity(Role::Driver, DRIVER)));
        assert!(!members.is_administrator(DRIVER));
        let refusal = members.reinstate(Role::Driver, DRIVER).unwrap_err();
        assert_eq!(refusal.kind, RefusalKind::NotFound);
    }

    #[test]
    fn there_is_a_limit_of_administrators() {
        let mut members = Members::default();
        for n in 0..MAX_ADMINISTRATORS {
            members.room_for_administrator().unwrap();
            assert!(members.add_administrator(&DriverId(n as u64).to_string()));
        }
        let refusal = members.room_for_administrator().unwrap_err();
        assert_eq!(refusal.kind, RefusalKind::TooLarge);
        members
            .revoke(Role::Driver, &DriverId(1).to_string(), "", 0)
            .unwrap();
        members.room_for_administrator().unwrap();
    }

    #[test]
    fn wrong_names_and_reasons_are_refused() {
        let mut members = Members::default();
        for (role, name) in [
            (Role::Node, DRIVER),
            (Role::Driver, NODE),
            (Role::Node, "node-1"),
            (Role::Head, "head"),
            (Role::Worker, "job-0000000000000001/0"),
            (Role::Node, ""),
        ] {
            let refusal = members.revoke(role, name, "", 0).unwrap_err();
            assert_eq!(refusal.kind, RefusalKind::Invalid, "{name}");
            assert!(
                refusal.message.contains("16 hexadecimal digits"),
                "{refusal}"
            );
        }
        for reason in ["a\nb".to_owned(), "x".repeat(MAX_REASON + 1)] {
            assert!(members.revoke(Role::Node, NODE, &reason, 0).is_err());
        }
        assert!(members.revoked().is_empty());
    }

    #[test]
    fn there_is_a_limit_and_old_ones_make_room_when_their_certificates_have_ended() {
        let mut members = Members::default();
        let name = |n: usize| NodeId(n as u64).to_string();
        for n in 0..MAX_REVOKED {
            members.revoke(Role::Node, &name(n), "", n as u64).unwrap();
        }
        let more = name(MAX_REVOKED);
        let refusal = members.revoke(Role::Node, &more, "", 9000).unwrap_err();
        assert_eq!(refusal.kind, RefusalKind::TooLarge);
        members
            .revoke(Role::Node, &more, "", FORGET_AFTER + 10)
            .unwrap();
        assert_eq!(members.revoked().len(), MAX_REVOKED - 10);
    }
}
