//! Random numbers and identities from the kernel.

use crate::ids::{ClusterId, DriverId, JobId, NodeId};

/// Fills `bytes` from the kernel's random generator.
pub(crate) fn fill_random(bytes: &mut [u8]) {
    let mut filled = 0;
    while filled < bytes.len() {
        match rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty()) {
            Ok(count) => filled += count,
            Err(rustix::io::Errno::INTR) => {}
            // The kernel's generator exists on every Linux that kolo supports.
            Err(error) => panic!("getrandom failed: {error}"),
        }
    }
}

pub(crate) fn random_u64() -> u64 {
    let mut bytes = [0_u8; 8];
    fill_random(&mut bytes);
    u64::from_ne_bytes(bytes)
}

/// An identity of random bits. A trait, for [`kolo_wire`] has no source of random numbers.
pub trait RandomId {
    /// A new identity from the kernel's random generator.
    #[must_use]
    fn random() -> Self;
}

macro_rules! random_ids {
    ($($name:ident),*) => {
        $(impl RandomId for $name {
            fn random() -> Self {
                Self(random_u64())
            }
        })*
    };
}

random_ids!(ClusterId, NodeId, JobId, DriverId);
