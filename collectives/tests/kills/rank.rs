//! A rank at work, over any kind of lane.

use super::*;

/// How a rank reaches the others, before it has a communicator.
pub(crate) enum Way {
    /// By peer.
    Sockets(HashMap<u32, UnixStream>),
    Network(Endpoint, TlsListener),
}

/// A rank at work. Fields drop in order.
pub(crate) struct Seat {
    pub(crate) comm: Communicator,
    pub(crate) network: Option<(Endpoint, TlsListener)>,
    pub(crate) _runtime: Option<Runtime>,
}

impl Drop for Seat {
    fn drop(&mut self) {
        if let Some((endpoint, listener)) = &self.network {
            listener.close();
            endpoint.close(kolo_transport::CloseCode::Done, "the test ends");
        }
    }
}

/// The sockets of one rank to lower ones.
#[derive(Debug)]
pub(crate) struct Sockets {
    pub(crate) rank: Rank,
    pub(crate) shares: bool,
    pub(crate) left: Mutex<HashMap<u32, UnixStream>>,
}

impl Connector for Sockets {
    fn connect(&self, peer: Rank) -> Connecting {
        let socket = self.left.lock().unwrap().remove(&peer.0);
        let own = hello(self.rank);
        Box::pin(async move {
            let socket = socket.ok_or_else(|| LaneError::Unreachable {
                reason: "the socket was used before".to_owned(),
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
            let higher: HashMap<u32, UnixStream> = higher;
            for (peer, socket) in higher {
                let acceptor = comm.acceptor();
                runtime.spawn(async move {
                    let own = hello(Rank(rank));
                    if let Ok(lane) = UnixLane::open(socket, &own, Rank(peer), LONG).await {
                        drop(acceptor.accept(Rank(peer), Box::new(lane)));
                    }
                });
            }
            Seat {
                comm: comm.with_timeout(lanes.limit()),
                network: None,
                _runtime: Some(runtime),
            }
        }
        Way::Network(endpoint, listener) => {
            let table = Arc::new(GenerationTable {
                job: JOB,
                generation: GENERATION,
                members: (0..)
                    .zip(addresses)
                    .map(|(rank, address)| member(rank, world, *address))
                    .collect(),
            });
            let choice = match lanes {
                Lanes::Quic => LaneChoice::Quic,
                _ => LaneChoice::Tls,
            };
            let connector = NetworkConnector {
                lanes: Arc::new(NetworkLanes::new(endpoint.clone(), choice)),
                table: Arc::clone(&table),
                hello: hello(Rank(rank)),
            };
            let runtime = endpoint.runtime().clone();
            let comm = Communicator::new(
                Rank(rank),
                world,
                GENERATION,
                JOB,
                Arc::new(connector),
                runtime.handle().clone(),
            )
            .unwrap()
            .with_timeout(lanes.limit());
            serve(&runtime, (&endpoint, &listener), &table, &comm);
            Seat {
                comm,
                network: Some((endpoint, listener)),
                _runtime: None,
            }
        }
    }
}

pub(crate) fn endpoint(credentials: &Credentials) -> (Endpoint, TlsListener) {
    let runtime = TransportRuntime::new(1).unwrap();
    let config = EndpointConfig {
        // So that the test does not take minutes.
        idle_timeout: Duration::from_millis(900),
        keep_alive: Duration::from_millis(200),
        ..EndpointConfig::default()
    };
    // Somebody may have the TCP port.
    loop {
        let endpoint = Endpoint::bind(&runtime, credentials.clone(), config.clone()).unwrap();
        if let Ok(listener) = endpoint.listen_tls() {
            return (endpoint, listener);
        }
    }
}

/// Works until a rank is lost. Returns the error and how many operations went well before. Once there are some, it has a link to
/// each of the others.
pub(crate) fn work(
    comm: &Communicator,
    mut seed: u64,
    ready: impl FnOnce(),
) -> (CollectiveError, u32) {
    let (rank, world) = (comm.rank().0, comm.world_size());
    // Every rank sends to every other one.
    let (own, counts) = (vec![rank; world as usize], vec![1; world as usize]);
    if let Err(error) = comm.all_to_all_varcount(&own, &counts) {
        return (error, 0);
    }
    ready();
    let mut operations = 1_u32;
    loop {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let length = [1, 40, 3000, 60_000, 400_000][(seed >> 33) as usize % 5];
        let value = (operations % 5 + rank) as f32;
        let mut data = vec![value; length];
        let sum = (operations % 5 * world + world * (world - 1) / 2) as f32;
        let root = operations % world;
        let of_root = (operations % 5 + root) as f32;
        let (result, expected) = match (seed >> 40) % 6 {
            0 => (comm.barrier(), value),
            1 => {
                let result = comm.broadcast(&mut data, Rank(root));
                if result.is_err() && rank != root {
                    // It is no input, and may hold anything.
                    data.fill(value);
                }
                (result, of_root)
            }
            2 => {
                let handle = comm.start().all_reduce(data, ReduceOp::Sum);
                match handle.wait_or_reclaim() {
                    Ok(all) => {
                        data = all;
                        (Ok(()), sum)
                    }
                    Err(failure) => {
                        data = failure.input.unwrap();
                        (Err(failure.error), value)
                    }
                }
            }
            3 => {
                let mine = &data[..=length / 4];
                let result = comm.all_gather_varcount(&mine[..mine.len() - rank as usize % 2]);
                (result.map(drop), value)
            }
            _ => (comm.all_reduce(&mut data, ReduceOp::Sum), sum),
        };
        let expected = if result.is_ok() { expected } else { value };
        assert!(data.iter().all(|value| *value == expected), "{result:?}");
        if let Err(error) = result {
            return (error, operations);
        }
        operations += 1;
    }
}
