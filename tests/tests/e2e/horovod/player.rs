//! A process that speaks Horovod's elastic protocol as a worker of Horovod does, and has no Horovod.
//!
//! Its members have a link with each other. A link that ends is what a failed collective is for Horovod: the worker drops all its links
//! and asks for its next rank.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};

use super::wire::{Key, pickled_addresses};

/// As long as Gloo waits for a peer.
const GLOO: Duration = Duration::from_secs(30);

/// The pause between two looks for a key, as in Horovod.
const PAUSE: Duration = Duration::from_millis(10);

fn var<T: std::str::FromStr>(name: &str) -> anyhow::Result<T> {
    let value = std::env::var(name).with_context(|| name.to_owned())?;
    value
        .parse()
        .ok()
        .with_context(|| format!("{name}={value}"))
}

#[derive(Debug, Clone, Copy)]
struct Place {
    rank: usize,
    size: usize,
    local_rank: usize,
    local_size: usize,
    cross_rank: usize,
    cross_size: usize,
}

struct Player {
    address: (String, u16),
    hostname: String,
    place: Place,
    links: TcpListener,
}

/// What ends the work of a member in its group.
#[derive(Debug, PartialEq, Eq)]
enum Event {
    LinkLost,
    HostsUpdated,
}

impl Player {
    fn new() -> anyhow::Result<Self> {
        ensure!(var::<u8>("HOROVOD_ELASTIC")? == 1);
        Ok(Self {
            address: (
                var("HOROVOD_GLOO_RENDEZVOUS_ADDR")?,
                var("HOROVOD_GLOO_RENDEZVOUS_PORT")?,
            ),
            hostname: var("HOROVOD_HOSTNAME")?,
            place: Place {
                rank: var("HOROVOD_RANK")?,
                size: var("HOROVOD_SIZE")?,
                local_rank: var("HOROVOD_LOCAL_RANK")?,
                local_size: var("HOROVOD_LOCAL_SIZE")?,
                cross_rank: var("HOROVOD_CROSS_RANK")?,
                cross_size: var("HOROVOD_CROSS_SIZE")?,
            },
            links: TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?,
        })
    }

    /// One request, as Horovod's client makes it. Nothing if the key is not there.
    fn request(&self, method: &str, path: &str, body: &[u8]) -> anyhow::Result<Option<Vec<u8>>> {
        let (host, port) = &self.address;
        let mut stream = TcpStream::connect((host.as_str(), *port))?;
        let length = body.len();
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {length}\r\n\r\n"
        )?;
        stream.write_all(body)?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer)?;
        let head = answer.windows(4).position(|part| part == b"\r\n\r\n");
        let head = head.context("no answer")?;
        let body = answer.split_off(head + 4);
        let status = answer.split(|byte| *byte == b' ').nth(1);
        match status {
            Some(b"200") => Ok(Some(body)),
            Some(b"404") => Ok(None),
            _ => bail!("{path}: {}", String::from_utf8_lossy(&answer)),
        }
    }

    /// Meets the others of a scope: the value of each.
    fn meet(&self, scope: &str, rank: usize, size: usize) -> anyhow::Result<Vec<String>> {
        let own = self.links.local_addr()?.port().to_string();
        self.request("PUT", &format!("/{scope}/rank_{rank}"), b"host")?;
        self.request("PUT", &format!("/{scope}/{rank}"), own.as_bytes())?;
        let end = Instant::now() + GLOO;
        let values = (0..size).map(|other| {
            let path = format!("/{scope}/{other}");
            loop {
                if let Some(value) = self.request("GET", &path, b"")? {
                    return Ok(String::from_utf8(value)?);
                }
                // A worker of Horovod is gone then.
                ensure!(Instant::now() < end, "{path} did not come");
                thread::sleep(PAUSE);
            }
        });
        values.collect()
    }

    /// Meets the group: the links to all others, which tell of their end.
    fn init(
        &mut self,
        is_first: bool,
        events: &std::sync::mpsc::Sender<Event>,
    ) -> anyhow::Result<Vec<TcpStream>> {
        if !is_first {
            let path = format!("/rank_and_size/{}:{}", self.hostname, self.place.local_rank);
            let answer = self
                .request("GET", &path, b"")?
                .context("404 instead of a rank")?;
            let answer = String::from_utf8(answer)?;
            let numbers: Result<Vec<usize>, _> = answer.split(',').map(str::parse).collect();
            let numbers = numbers.with_context(|| format!("removed: {answer}"))?;
            let [rank, size, local_rank, local_size, cross_rank, cross_size] = numbers[..] else {
                bail!("{answer}");
            };
            self.place = Place {
                rank,
                size,
                local_rank,
                local_size,
                cross_rank,
                cross_size,
            };
        }
        let Place {
            rank,
            size,
            local_rank,
            local_size,
            cross_rank,
            cross_size,
        } = self.place;
        let ports = self.meet("global", rank, size)?;
        let mut links = Vec::new();
        for port in &ports[..rank] {
            links.push(TcpStream::connect((Ipv4Addr::LOCALHOST, port.parse()?))?);
        }
        for _ in rank + 1..size {
            links.push(self.links.accept()?.0);
        }
        let scopes = [
            (format!("local_{}", self.hostname), local_rank, local_size),
            (format!("cross_{local_rank}"), cross_rank, cross_size),
        ];
        self.request("DELETE", &format!("/global/{rank}"), b"")?;
        for (scope, rank, size) in scopes {
            self.meet(&scope, rank, size)?;
            self.request("DELETE", &format!("/{scope}/{rank}"), b"")?;
        }
        for link in &links {
            let (mut link, events) = (link.try_clone()?, events.clone());
            thread::spawn(move || {
                // Nobody writes: whatever comes is the end.
                drop(link.read(&mut [0]));
                // The member that is told has gone on, perhaps.
                drop(events.send(Event::LinkLost));
            });
        }
        Ok(links)
    }

    /// Listens for notices that hosts have changed.
    fn hear(&self) -> anyhow::Result<Receiver<u64>> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let key = Key::new([7; 32]);
        let value = pickled_addresses(listener.local_addr()?.port(), key.bytes());
        let path = format!(
            "/worker_addresses/{}:{}",
            self.hostname, self.place.local_rank
        );
        self.request("PUT", &path, &value)?
            .context("404 for a PUT")?;
        let (send, notices) = channel();
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                match key.serve(stream) {
                    Ok(number) if send.send(number).is_ok() => {}
                    Ok(_) => return,
                    Err(error) => println!("a bad notice: {error:?}"),
                }
            }
        });
        Ok(notices)
    }
}

/// Works until the file is there.
pub fn play(stop: &Path) -> anyhow::Result<()> {
    let mut player = Player::new()?;
    let mut notices = None;
    let mut last = 0;
    for generation in 0.. {
        let (send, events) = channel();
        let links = player.init(generation == 0, &send)?;
        let Place { rank, size, .. } = player.place;
        println!("\nmember {rank}/{size} {}", std::process::id());
        if notices.is_none() {
            notices = Some(player.hear()?);
        }
        let event = loop {
            if stop.exists() {
                println!("\ndone {rank}/{size}");
                return Ok(());
            }
            if let Some(number) = notices.iter().flat_map(Receiver::try_iter).last()
                && rank == 0
                && number > last
            {
                last = number;
                break Event::HostsUpdated;
            }
            if let Ok(event) = events.recv_timeout(PAUSE) {
                break event;
            }
        };
        // The others see it as Horovod's do. At the end of the job all leave at once.
        for link in links {
            match link.shutdown(std::net::Shutdown::Both) {
                Err(error) if error.kind() != ErrorKind::NotConnected => return Err(error.into()),
                _ => {}
            }
        }
        if stop.exists() {
            println!("\ndone {rank}/{size}");
            return Ok(());
        }
        println!("\nleaves: {event:?}");
    }
    Ok(())
}
