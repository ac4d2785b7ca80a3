//! Programs that drivers send.

use kolo_runtime::ProgramSource;
use kolo_transport::wire::{NodeReply, NodeRequest, Program, ProgramHash};
use kolo_transport::{Connection, Limits};
use serde::Serialize;
use tempfile::TempDir;

use crate::bed::{Bed, own_program, soon};

/// The head of the frames that make up a program.
#[derive(Serialize)]
struct Piece {}

pub(crate) async fn put(connection: &Connection, program: &Program, content: &[u8]) -> NodeReply {
    let mut stream = connection.open(Limits::CONTROL).await.unwrap();
    let request = NodeRequest::PutProgram {
        program: program.clone(),
    };
    stream.send.send(&request, &[]).await.unwrap();
    for piece in content.chunks(1 << 20) {
        // The node may have heard enough.
        if soon(stream.send.send(&Piece {}, piece)).await.is_err() {
            break;
        }
    }
    stream.send.finish();
    soon(stream.recv.expect()).await.unwrap().head
}

async fn has(connection: &Connection, hash: ProgramHash) -> bool {
    let request = NodeRequest::HasProgram { hash };
    let limit = std::time::Duration::from_secs(60);
    match connection.request(&request, limit).await.unwrap() {
        NodeReply::HasProgram(has) => has,
        other => panic!("{other:?}"),
    }
}

async fn a_program_is_sent_once_and_runs(cache: Option<&TempDir>) {
    let bed = Bed::start_with(|config| {
        config.programs = ProgramSource {
            cache: cache.map(|dir| dir.path().join("programs")),
            ..ProgramSource::default()
        };
    })
    .await;
    let (program, path) = own_program();
    let content = std::fs::read(path).unwrap();
    let connection = bed.connect().await;
    assert!(!has(&connection, program.hash).await);
    // Two drivers may come with it at once.
    let (first, second) = tokio::join!(
        put(&connection, &program, &content),
        put(&connection, &program, &content)
    );
    assert_eq!((first, second), (NodeReply::Done, NodeReply::Done));
    assert!(has(&connection, program.hash).await);
    assert_eq!(put(&connection, &program, &[]).await, NodeReply::Done);
    let job = bed.healthy(2, "").await;
    let mut calls = job.attach().await;
    assert_eq!(calls.call(1, "rank").await, "1");
    job.stop().await;
    bed.end().await;
}

#[tokio::test]
async fn a_program_that_is_kept_in_a_folder_runs() {
    let dir = TempDir::new().unwrap();
    a_program_is_sent_once_and_runs(Some(&dir)).await;
    let left = std::fs::read_dir(dir.path().join("programs")).unwrap();
    assert_eq!(left.count(), 1, "the program and nothing else");
}

#[tokio::test]
async fn a_program_that_is_kept_in_memory_runs() {
    a_program_is_sent_once_and_runs(None).await;
}
