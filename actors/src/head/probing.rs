//! Carries out a [`Discovery`]: orders to the nodes, their answers back.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use kolo_core::head::job::Reply;
use kolo_core::interfaces::{Discovery, Key, Network, Step};
use kolo_transport::AwakeClock;
use kolo_transport::ids::NodeId;
use kolo_transport::wire::{NetworkReport, NodeReply, NodeRequest, Probe, ProbeResult};
use tokio::sync::watch;

use super::link::NodeLink;

/// What connects the nodes, or the report that says why nothing does.
pub(super) type Found = Result<Arc<Network>, NetworkReport>;

/// What is wanted: the discovery, and for what its result is valid.
#[derive(Debug)]
pub(super) struct Search {
    pub(super) discovery: Discovery,
    /// `None` if the result is of use for nobody else.
    pub(super) key: Option<Key>,
    /// Whether a probe that has begun already does not count.
    pub(super) anew: bool,
}

/// The probes that are under way. Whoever wants to know the same waits for the one that runs, so that nodes are not
/// probed by many at once.
#[derive(Debug, Clone, Default)]
pub(super) struct Probes {
    running: Arc<Mutex<HashMap<Key, watch::Receiver<Option<Found>>>>>,
}

/// A probe that others may wait for. Dropped before its end, they learn that it has none.
struct Lead {
    probes: Probes,
    key: Key,
    told: watch::Sender<Option<Found>>,
}

impl Drop for Lead {
    fn drop(&mut self) {
        let mut running = self.probes.running();
        // One that began later may have taken its place.
        let own = running
            .get(&self.key)
            .is_some_and(|other| other.same_channel(&self.told.subscribe()));
        if own {
            running.remove(&self.key);
        }
    }
}

impl Probes {
    fn running(&self) -> MutexGuard<'_, HashMap<Key, watch::Receiver<Option<Found>>>> {
        // No code that holds the lock can leave the table half changed.
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The probe that runs for this key, or the right to run it.
    fn join(&self, key: Key, anew: bool) -> Result<Lead, watch::Receiver<Option<Found>>> {
        let mut running = self.running();
        if !anew && let Some(found) = running.get(&key) {
            return Err(found.clone());
        }
        let (told, found) = watch::channel(None);
        running.insert(key.clone(), found);
        Ok(Lead {
            probes: self.clone(),
            key,
            told,
        })
    }

    /// Finds out what connects the nodes behind these links, or waits for somebody who does. Each address may take
    /// `limit`.
    pub(super) async fn find(
        self,
        search: Search,
        links: HashMap<NodeId, Arc<dyn NodeLink>>,
        (clock, limit): (AwakeClock, Duration),
    ) -> Found {
        let Search {
            discovery,
            key,
            anew,
        } = search;
        let Some(key) = key else {
            return discover(discovery, links, (&clock, limit)).await;
        };
        loop {
            match self.join(key.clone(), anew) {
                Ok(lead) => {
                    let found = discover(discovery, links, (&clock, limit)).await;
                    lead.told.send_replace(Some(found.clone()));
                    return found;
                }
                Err(mut running) => {
                    if let Ok(found) = running.wait_for(Option::is_some).await
                        && let Some(found) = found.clone()
                    {
                        return found;
                    }
                    // Whoever ran it was stopped: it is the turn of the next.
                }
            }
        }
    }
}

/// Finds out what connects the nodes behind these links. Each address may take `limit`. When the future is dropped, the
/// nodes learn that nobody waits any more.
async fn discover(
    mut discovery: Discovery,
    links: HashMap<NodeId, Arc<dyn NodeLink>>,
    (clock, limit): (&AwakeClock, Duration),
) -> Found {
    let start = Instant::now();
    let mut answers = FuturesUnordered::new();
    let mut step = discovery.start();
    loop {
        match step {
            Step::Probe(orders) => {
                for order in orders {
                    let deadline = order.deadline(limit);
                    let node = order.node;
                    let request = NodeRequest::Probe(Probe {
                        targets: order.targets,
                        limit_ms: u64::try_from(limit.as_millis()).unwrap_or(u64::MAX),
                    });
                    let asked = links.get(&node).map(|link| link.request(request, deadline));
                    answers.push(async move {
                        let reply = match asked {
                            Some(asked) => {
                                clock.timeout(deadline, asked).await.unwrap_or_else(|| {
                                    Reply::Unknown(format!("no answer within {deadline:?}"))
                                })
                            }
                            None => Reply::Unknown("there is no connection to it".to_owned()),
                        };
                        (node, results(reply))
                    });
                }
            }
            Step::Wait => {}
            Step::Done(result) => {
                let took_ms = u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX);
                return match *result {
                    Ok(mut network) => {
                        network.report.took_ms = took_ms;
                        Ok(Arc::new(network))
                    }
                    Err(mut report) => {
                        report.took_ms = took_ms;
                        Err(report)
                    }
                };
            }
        }
        // Every order has an answer, so there is nothing left to wait for only when it is done.
        step = if let Some((node, results)) = answers.next().await {
            discovery.answered(node, results)
        } else {
            let left = discovery.waits_for().next();
            match left {
                Some(node) => discovery.answered(node, Err("it was not asked".to_owned())),
                None => return Err(discovery.abandoned()),
            }
        };
    }
}

fn results(reply: Reply) -> Result<Vec<ProbeResult>, String> {
    match reply {
        Reply::Answer(NodeReply::Probed(results)) => Ok(results),
        Reply::Answer(_) => Err("its answer is none to a probe".to_owned()),
        Reply::Refused(refusal) => Err(refusal.message),
        Reply::Unknown(reason) => Err(reason),
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use kolo_core::interfaces::{Host, Plan, plan};
    use kolo_transport::session::CloseCode;
    use kolo_transport::wire::network::{Interface, InterfaceAddress};
    use kolo_transport::wire::{Echo, InterfaceSelection, NetworkChoice, NodeNetwork};
    use tokio::sync::Semaphore;

    use super::super::link::SendFuture;
    use super::*;
    use kolo_transport::awake::TICK;

    fn ip(node: u64) -> IpAddr {
        IpAddr::from([10, 0, 0, node as u8])
    }

    fn host(node: u64) -> Host {
        let eth = Interface {
            name: "eth0".to_owned(),
            up: true,
            loopback: false,
            mtu: 1500,
            speed: None,
            addresses: vec![InterfaceAddress {
                ip: ip(node),
                prefix: 24,
            }],
        };
        Host {
            node: NodeId(node),
            hostname: format!("host{node}"),
            address: (ip(node), 7).into(),
            network: Some(NodeNetwork {
                listen: ([0, 0, 0, 0], 7).into(),
                host: format!("h{node}"),
                interfaces: vec![eth],
            }),
        }
    }

    fn search(anew: bool) -> Search {
        let hosts = vec![host(1), host(2)];
        let selection = InterfaceSelection::default();
        let key = Key::new(&hosts, &selection);
        let Plan::Probe(discovery) = plan(hosts, &selection).unwrap() else {
            panic!("two hosts are probed");
        };
        Search {
            discovery: *discovery,
            key,
            anew,
        }
    }

    /// A node that reaches what it is asked to when it may.
    struct Link {
        own: u64,
        asked: Arc<AtomicUsize>,
        may: Arc<Semaphore>,
    }

    impl NodeLink for Link {
        fn request(&self, request: NodeRequest, _: Duration) -> SendFuture<Reply> {
            self.asked.fetch_add(1, Ordering::SeqCst);
            let (may, from) = (Arc::clone(&self.may), ip(self.own));
            Box::pin(async move {
                may.acquire().await.unwrap().forget();
                let NodeRequest::Probe(probe) = request else {
                    panic!("nobody asks that");
                };
                let reached = |_: &_| ProbeResult::Reached {
                    rtt_us: 100,
                    echo: Echo {
                        seen: (from, 7).into(),
                        local: None,
                        interface: Some("eth0".to_owned()),
                        time_ms: 0,
                    },
                };
                let results = probe.targets.iter().map(reached).collect();
                Reply::Answer(NodeReply::Probed(results))
            })
        }

        fn local_ip(&self) -> Option<IpAddr> {
            None
        }

        fn close(&self, _: CloseCode, _: &str) {}
    }

    #[derive(Clone)]
    struct World {
        probes: Probes,
        asked: Arc<AtomicUsize>,
        may: Arc<Semaphore>,
    }

    impl World {
        fn new() -> Self {
            Self {
                probes: Probes::default(),
                asked: Arc::default(),
                may: Arc::new(Semaphore::new(0)),
            }
        }

        fn find(&self, anew: bool) -> impl Future<Output = Found> + use<> {
            let link = |own| -> Arc<dyn NodeLink> {
                Arc::new(Link {
                    own,
                    asked: Arc::clone(&self.asked),
                    may: Arc::clone(&self.may),
                })
            };
            let links = [1, 2].map(|node| (NodeId(node), link(node))).into();
            let clock = AwakeClock::start(&tokio::runtime::Handle::current(), TICK);
            let limit = (clock, Duration::from_secs(60));
            self.probes.clone().find(search(anew), links, limit)
        }

        fn asked(&self) -> usize {
            self.asked.load(Ordering::SeqCst)
        }
    }

    fn is_good(found: &Found) {
        let network = found.as_ref().unwrap();
        assert_eq!(
            network.report.choice,
            NetworkChoice::Interface("eth0".to_owned())
        );
    }

    #[tokio::test]
    async fn who_wants_to_know_the_same_waits_for_the_probe_that_runs() {
        let world = World::new();
        let mut first = by_hand(world.find(false));
        let mut second = by_hand(world.find(false));
        assert!(first.is_waiting() && second.is_waiting());
        assert_eq!(world.asked(), 2, "both nodes, once");
        // Who wants a new one does not take what began before.
        let mut anew = by_hand(world.find(true));
        assert!(anew.is_waiting());
        assert_eq!(world.asked(), 4);
        world.may.add_permits(4);
        is_good(&first.0.await);
        is_good(&second.0.await);
        is_good(&anew.0.await);
        assert!(world.probes.running().is_empty());
        world.may.add_permits(2);
        is_good(&world.find(false).await);
        assert_eq!(world.asked(), 6, "what has ended is nothing to wait for");
    }

    #[tokio::test]
    async fn a_probe_that_is_given_up_is_run_by_the_next_who_waits() {
        let world = World::new();
        let mut first = by_hand(world.find(false));
        assert!(first.is_waiting());
        let mut second = by_hand(world.find(false));
        assert!(second.is_waiting());
        drop(first);
        assert!(second.is_waiting());
        assert_eq!(world.asked(), 4);
        world.may.add_permits(2);
        is_good(&second.0.await);
        assert!(world.probes.running().is_empty());
    }

    /// A future that is polled by hand.
    struct ByHand(std::pin::Pin<Box<dyn Future<Output = Found>>>);

    fn by_hand(future: impl Future<Output = Found> + 'static) -> ByHand {
        ByHand(Box::pin(future))
    }

    impl ByHand {
        fn is_waiting(&mut self) -> bool {
            let mut context = std::task::Context::from_waker(std::task::Waker::noop());
            self.0.as_mut().poll(&mut context).is_pending()
        }
    }
}
