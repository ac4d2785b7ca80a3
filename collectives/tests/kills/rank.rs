//! A rank at work, over any kind of lane.

use super::*;

/// Links of two ranks at most: one of all ranks, one of a group, one for names, and one for each direction of sends, and one more.
pub(crate) const LINKS: usize = 6;

/// How a rank reaches the others, before it has a communicator.
pub(crate) enum Way {
    /// By peer, one for each link.
    Sockets(HashMap<u32, Vec<UnixStream>>),
    Network(Door, TransportRuntime),
}

/// A rank at work. Fields drop in order.
pub(crate) struct Seat {
    pub(crate) comm: Communicator,
    pub(crate) network: Option<Door>,
    pub(crate) _runtime: Option<Runtime>,
}

impl Drop for Seat {
    fn drop(&mut self) {
        if let Some(door) = &self.network {
            door.close(kolo_transport::CloseCode::Done, "the test ends");
        }
    }
}

/// The sockets of one rank to lower ones.
#[derive(Debug)]
pub(crate) struct Sockets {
    pub(crate) rank: Rank,
    pub(crate) shares: bool,
    pub(crate) left: Mutex<HashMap<u32, Vec<UnixStream>>>,
}

impl Connector for Sockets {
    fn word_within(&self) -> Duration {
        WORD
    }

    fn connect(&self, peer: Rank) -> Connecting {
        self.connect_group(peer, GroupId::WORLD)
    }

    fn connect_group(&self, peer: Rank, group: GroupId) -> Connecting {
        let mut left = self.left.lock().unwrap();
        let socket = left.get_mut(&peer.0).and_then(Vec::pop);
        let own = hello(self.rank).of_group(group);
        Box::pin(async move {
            let socket = socket.ok_or_else(|| LaneError::Unreachable {
                reason: "all sockets were used before".to_owned(),
            })?;
            let lane = UnixLane::open(socket, &own, peer, LONG).await?;
            Ok(Box::new(lane) as Box<dyn Lane>)
        })
    }

    fn is_one_host(&self, _ranks: &[Rank]) -> Option<OneHost> {
        let shares = self.shares;
        Some(Box::pin(async move { shares }))
    }
}

pub(crate) fn sit(rank: u32, world: u32, lanes: Lanes, way: Way, addresses: &[SocketAddr]) -> Seat {
    match way {
        Way::Sockets(sockets) => {
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .worker_threads(1)
                .enable_all()
                .build()
                .unwrap();
            let (lower, higher) = sockets.into_iter().partition(|(peer, _)| *peer < rank);
            let connector = Arc::new(Sockets {
                rank: Rank(rank),
                shares: lanes == Lanes::Shared,
                left: Mutex::new(lower),
            });
            let handle = runtime.handle().clone();
            let comm =
                Communicator::new(Rank(rank), world, GENERATION, JOB, connector, handle).unwrap();
            let higher: HashMap<u32, Vec<UnixStream>> = higher;
            let links = higher
                .into_iter()
                .flat_map(|(peer, sockets)| sockets.into_iter().map(move |socket| (peer, socket)));
            for (peer, socket) in links {
                let acceptor = comm.acceptor();
                runtime.spawn(async move {
                    let own = hello(Rank(rank));
                    if let Ok(lane) = UnixLane::open(socket, &own, Rank(peer), LONG).await {
                        drop(acceptor.accept_group(lane.group(), Rank(peer), Box::new(lane)));
                    }
                });
            }
            Seat {
                comm: comm.with_timeout(LIMIT),
                network: None,
                _runtime: Some(runtime),
            }
        }
        Way::Network(door, runtime) => Seat {
            comm: join(&runtime, &door, rank, addresses).with_timeout(LIMIT),
            network: Some(door),
            _runtime: None,
        },
    }
}

pub(crate) fn host(credentials: &Credentials) -> (Door, TransportRuntime) {
    let runtime = TransportRuntime::new(1).unwrap();
    let config = EndpointConfig {
        // So that the test does not take minutes.
        idle_timeout: Duration::from_millis(900),
        keep_alive: Duration::from_millis(200),
        ..EndpointConfig::default()
    };
    let door = door(&runtime, credentials.clone(), config, LaneChoice::Tls);
    (door, runtime)
}
