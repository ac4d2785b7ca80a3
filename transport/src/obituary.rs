//! Obituaries of daemons, as [datagrams](Obituary) beside the packets of QUIC: to the same port, so that no firewall needs a rule for them.

use std::fmt;

use quinn::udp::RecvMeta;
use tokio::sync::mpsc;

use crate::ids::{JobId, NodeId};
use crate::random::fill_random;
use crate::wire::{Obituary, Seal};

/// How each one begins. Bytes of a packet of QUIC equal it by chance once in 2^96 times; such a packet is for QUIC all the same.
const BEGIN: [u8; 12] = *b"\0kolo/1 dead";

/// Length of each one: [`BEGIN`], the node, the job, the secret.
const LENGTH: usize = BEGIN.len() + 8 + 8 + 32;

/// Obituaries that may wait. More are lost, as datagrams may be.
pub const WAITING: usize = 256;

/// What makes an obituary true. Drawn when the daemon starts, and given away when it is dead.
#[derive(Clone)]
pub struct ObituarySecret([u8; 32]);

impl ObituarySecret {
    /// A new secret from the kernel's random generator.
    #[must_use]
    pub fn random() -> Self {
        let mut secret = [0; 32];
        fill_random(&mut secret);
        Self(secret)
    }

    /// What the head is told of it.
    #[must_use]
    pub fn seal(&self) -> Seal {
        Seal(*blake3::hash(&self.0).as_bytes())
    }

    /// The datagram that says that the daemon of `node` is dead and nothing is left of `job` there. It holds the secret.
    #[must_use]
    pub fn datagram(&self, node: NodeId, job: JobId) -> Vec<u8> {
        let (node, job) = (node.0.to_be_bytes(), job.0.to_be_bytes());
        [&BEGIN[..], &node, &job, &self.0].concat()
    }
}

impl fmt::Debug for ObituarySecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ObituarySecret").finish_non_exhaustive()
    }
}

/// Reads a datagram that may be an obituary.
fn read(datagram: &[u8]) -> Option<Obituary> {
    let datagram: &[u8; LENGTH] = datagram.try_into().ok()?;
    let rest = datagram.strip_prefix(&BEGIN)?;
    let (node, rest) = rest.split_first_chunk()?;
    let (job, secret) = rest.split_first_chunk()?;
    Some(Obituary {
        node: NodeId(u64::from_be_bytes(*node)),
        job: JobId(u64::from_be_bytes(*job)),
        seal: Seal(*blake3::hash(secret).as_bytes()),
    })
}

/// Takes obituaries out of what a socket has received. QUIC drops them as packets of no connection.
pub(crate) fn listen(to: &mpsc::Sender<Obituary>, received: &[u8], meta: &RecvMeta) {
    let received = received.get(..meta.len).unwrap_or_default();
    // The kernel may have put datagrams of one sender together.
    for obituary in received.chunks(meta.stride.max(1)).filter_map(read) {
        if to.try_send(obituary).is_err() {
            tracing::debug!(node = %obituary.node, "an obituary is not taken");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODE: NodeId = NodeId(7);
    const JOB: JobId = JobId(0x0102_0304_0506_0708);

    #[test]
    fn what_is_said_is_read_and_nothing_else() {
        let secret = ObituarySecret::random();
        let datagram = secret.datagram(NODE, JOB);
        let obituary = Obituary {
            node: NODE,
            job: JOB,
            seal: secret.seal(),
        };
        assert_eq!(read(&datagram), Some(obituary));
        assert_eq!(read(&datagram[1..]), None);
        assert_eq!(read(&[&datagram[..], &[0]].concat()), None);
        for index in 0..BEGIN.len() {
            let mut other = datagram.clone();
            other[index] ^= 1;
            assert_eq!(read(&other), None, "byte {index}");
        }
        let mut forged = datagram;
        forged[LENGTH - 1] ^= 1;
        assert_ne!(read(&forged).unwrap().seal, secret.seal());
    }

    #[test]
    fn the_secret_is_not_shown() {
        let secret = ObituarySecret([171; 32]);
        assert_eq!(format!("{secret:?}"), "ObituarySecret { .. }");
        assert_ne!(secret.seal().0, secret.0);
    }

    #[test]
    fn datagrams_that_the_kernel_has_put_together_are_told_apart() {
        let secret = ObituarySecret::random();
        let both = [secret.datagram(NODE, JobId(1)), secret.datagram(NODE, JOB)].concat();
        let mut meta = RecvMeta::default();
        (meta.len, meta.stride) = (both.len(), LENGTH);
        let (sender, mut obituaries) = mpsc::channel(8);
        listen(&sender, &both, &meta);
        assert_eq!(obituaries.try_recv().unwrap().job, JobId(1));
        assert_eq!(obituaries.try_recv().unwrap().job, JOB);
        // The buffer is longer than what came.
        meta.len = LENGTH;
        listen(&sender, &both, &meta);
        assert_eq!(obituaries.try_recv().unwrap().job, JobId(1));
        assert!(obituaries.try_recv().is_err());
    }
}
