//! Output in files: one for each rank, stream and generation, and none is ever written over; or as `horovodrun` has them.

use std::collections::{HashMap, VecDeque};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use kolo_transport::ids::JobId;
use kolo_transport::wire::{OutputChunk, Stdio};

use super::super::error::CliError;
use super::prefix::stream_name;

/// Files that are open at once.
const OPEN: usize = 128;

type Key = (u64, u32, Stdio);

/// Where the files of a job are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Destination {
    /// In a folder of this folder that is named after the job.
    Jobs(PathBuf),
    /// In a folder of this folder for each rank, as `horovodrun --output-filename` has it: files that are there are written over.
    Ranks(PathBuf),
    /// In a folder of this folder that is named after the job, as `torchrun --log-dir` has it: a folder for each group, with
    /// one for each rank.
    Attempts(PathBuf),
}

impl Destination {
    /// The folder that was given.
    pub(crate) fn dir(&self) -> &Path {
        match self {
            Self::Jobs(dir) | Self::Ranks(dir) | Self::Attempts(dir) => dir,
        }
    }

    /// The option that gives it.
    fn option(&self) -> &'static str {
        match self {
            Self::Jobs(_) => "--output-dir",
            Self::Ranks(_) => "--output-filename",
            Self::Attempts(_) => "--log-dir",
        }
    }
}

/// The files of a job.
#[derive(Debug)]
pub(crate) struct Files {
    folder: PathBuf,
    destination: Destination,
    width: usize,
    open: HashMap<Key, File>,
    /// The longest unused first.
    order: VecDeque<Key>,
    made: std::collections::HashSet<Key>,
}

/// `rank-03.gen-1.stdout`, with as many digits as the last rank has.
fn name((generation, rank, stream): Key, width: usize) -> String {
    format!(
        "rank-{rank:0width$}.gen-{generation}.{}",
        stream_name(stream)
    )
}

/// Makes the folder for the folders of jobs, before anything is started: that it can't be used is to be known then. Gives the
/// folders that were not there, the outermost first.
pub(crate) fn prepare(destination: Option<&Destination>) -> Result<Vec<PathBuf>, CliError> {
    let Some(destination) = destination else {
        return Ok(Vec::new());
    };
    let dir = destination.dir();
    let mut missing: Vec<PathBuf> = dir
        .ancestors()
        .take_while(|path| !path.exists())
        .map(Path::to_path_buf)
        .collect();
    missing.reverse();
    let made = (|| {
        if dir.exists() && !dir.is_dir() {
            return Err(io::Error::other("it is no directory"));
        }
        fs::create_dir_all(dir)?;
        rustix::fs::access(
            dir,
            rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK,
        )?;
        Ok(())
    })();
    match made {
        Ok(()) => Ok(missing),
        Err(error) => Err(CliError::Usage(format!(
            "{} {}: {error}",
            destination.option(),
            dir.display()
        ))),
    }
}

/// As [`prepare`], and takes away again what it made: to see whether it would work.
pub(crate) fn try_to_prepare(destination: Option<&Destination>) -> Result<(), CliError> {
    for made in prepare(destination)?.iter().rev() {
        // What somebody else has put something into by now stays.
        fs::remove_dir(made).ok();
    }
    Ok(())
}

impl Files {
    /// Makes the folder of the job, with the empty files of the first generation.
    pub(crate) fn create(destination: &Destination, job: JobId, workers: u32) -> io::Result<Self> {
        let dir = destination.dir();
        fs::create_dir_all(dir)?;
        let folder = match destination {
            Destination::Jobs(dir) | Destination::Attempts(dir) => {
                let folder = dir.join(job.to_string());
                fs::create_dir(&folder)?;
                folder
            }
            Destination::Ranks(dir) => dir.clone(),
        };
        let width = workers.saturating_sub(1).max(1).ilog10() as usize + 1;
        let mut files = Self {
            folder,
            destination: destination.clone(),
            width,
            open: HashMap::new(),
            order: VecDeque::new(),
            made: std::collections::HashSet::new(),
        };
        for rank in 0..workers {
            for stream in [Stdio::Stdout, Stdio::Stderr] {
                files.file((1, rank, stream))?;
            }
        }
        Ok(files)
    }

    /// Where they are.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Appends a piece as it is.
    pub(crate) fn write(&mut self, head: &OutputChunk, piece: &[u8]) -> io::Result<()> {
        // A rank goes on in its file.
        let generation = match self.destination {
            Destination::Ranks(_) => 1,
            Destination::Jobs(_) | Destination::Attempts(_) => head.generation.0,
        };
        self.file((generation, head.rank.0, head.stream))?
            .write_all(piece)
    }

    /// Where the file is, in the folder.
    fn path(&self, key: Key) -> PathBuf {
        let (generation, rank, stream) = key;
        let stream = stream_name(stream);
        match self.destination {
            Destination::Jobs(_) => name(key, self.width).into(),
            Destination::Ranks(_) => {
                format!("rank.{rank:0width$}/{stream}", width = self.width).into()
            }
            // The first is attempt 0.
            Destination::Attempts(_) => {
                format!("attempt_{}/{rank}/{stream}.log", generation - 1).into()
            }
        }
    }

    fn file(&mut self, key: Key) -> io::Result<&mut File> {
        if self.open.contains_key(&key) {
            if self.order.back() != Some(&key) {
                self.order.retain(|other| *other != key);
                self.order.push_back(key);
            }
        } else {
            if self.open.len() >= OPEN
                && let Some(oldest) = self.order.pop_front()
            {
                self.open.remove(&oldest);
            }
            let mut options = OpenOptions::new();
            options.append(true);
            let is_new = self.made.insert(key);
            let path = self.folder.join(self.path(key));
            if let (true, Some(folder)) = (is_new, path.parent()) {
                fs::create_dir_all(folder)?;
            }
            if let Destination::Ranks(_) = self.destination {
                if is_new {
                    // What an earlier run has left there goes.
                    File::create(&path)?;
                }
            } else {
                // A file that is there already and is not ours is an error, not a place to write.
                options.create_new(is_new);
            }
            self.open.insert(key, options.open(path)?);
            self.order.push_back(key);
        }
        self.open
            .get_mut(&key)
            .ok_or_else(|| io::Error::other("a file that was opened is gone"))
    }
}

#[cfg(test)]
mod tests {
    use kolo_transport::ids::{Generation, Rank};

    use super::*;

    fn head(rank: u32, generation: u64, stream: Stdio) -> OutputChunk {
        OutputChunk {
            rank: Rank(rank),
            generation: Generation(generation),
            stream,
            time_ms: 0,
        }
    }

    fn jobs(dir: &Path) -> Destination {
        Destination::Jobs(dir.to_owned())
    }

    #[test]
    fn as_horovodrun_has_them_there_is_a_folder_for_each_rank() {
        let dir = tempfile::tempdir().unwrap();
        let destination = Destination::Ranks(dir.path().join("out"));
        let read = |name: &str| fs::read_to_string(dir.path().join("out").join(name)).unwrap();
        for job in 1..3 {
            let mut files = Files::create(&destination, JobId(job), 300).unwrap();
            for generation in 1..3 {
                for rank in 0..300 {
                    let text = format!("{job}.{generation} ");
                    let chunk = head(rank, generation, Stdio::Stdout);
                    files.write(&chunk, text.as_bytes()).unwrap();
                }
            }
            assert!(files.open.len() <= OPEN);
            assert_eq!(read("rank.007/stdout"), format!("{job}.1 {job}.2 "));
            assert_eq!(read("rank.299/stderr"), "");
        }
        Files::create(&destination, JobId(3), 1).unwrap();
        assert_eq!(read("rank.0/stdout"), "");
        let file = Destination::Ranks(dir.path().join("out/rank.0/stdout"));
        let error = prepare(Some(&file)).unwrap_err().to_string();
        assert!(error.starts_with("--output-filename "), "{error}");
    }

    #[test]
    fn as_torchrun_has_them_there_is_a_folder_for_each_group_and_nothing_is_written_over() {
        let dir = tempfile::tempdir().unwrap();
        let destination = Destination::Attempts(dir.path().join("logs"));
        let mut files = Files::create(&destination, JobId(7), 2).unwrap();
        files.write(&head(1, 1, Stdio::Stdout), b"first").unwrap();
        files.write(&head(1, 2, Stdio::Stdout), b"second").unwrap();
        files.write(&head(1, 1, Stdio::Stdout), b" more").unwrap();
        let folder = dir.path().join("logs/job-0000000000000007");
        let read = |name: &str| fs::read_to_string(folder.join(name)).unwrap();
        assert_eq!(read("attempt_0/1/stdout.log"), "first more");
        assert_eq!(read("attempt_1/1/stdout.log"), "second");
        assert_eq!(read("attempt_0/0/stderr.log"), "");
        assert!(Files::create(&destination, JobId(7), 1).is_err());
    }

    #[test]
    fn every_rank_stream_and_generation_has_its_file_with_the_very_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let mut files = Files::create(&jobs(dir.path()), JobId(7), 11).unwrap();
        files.write(&head(3, 1, Stdio::Stdout), b"a\xff").unwrap();
        files.write(&head(3, 1, Stdio::Stderr), b"err").unwrap();
        files.write(&head(3, 2, Stdio::Stdout), b"again").unwrap();
        files.write(&head(3, 1, Stdio::Stdout), b"\r\nb").unwrap();
        let folder = files.folder().to_owned();
        assert_eq!(folder, dir.path().join("job-0000000000000007"));
        let read = |name: &str| fs::read(folder.join(name)).unwrap();
        assert_eq!(read("rank-03.gen-1.stdout"), b"a\xff\r\nb");
        assert_eq!(read("rank-03.gen-1.stderr"), b"err");
        assert_eq!(read("rank-03.gen-2.stdout"), b"again");
        assert_eq!(read("rank-10.gen-1.stdout"), b"", "also who wrote nothing");
    }

    #[test]
    fn more_ranks_than_open_files_and_nothing_is_written_over() {
        let dir = tempfile::tempdir().unwrap();
        let mut files = Files::create(&jobs(dir.path()), JobId(1), 300).unwrap();
        for round in 0..3 {
            for rank in 0..300 {
                let text = format!("{rank}.{round} ");
                files
                    .write(&head(rank, 1, Stdio::Stdout), text.as_bytes())
                    .unwrap();
            }
        }
        assert!(files.open.len() <= OPEN && files.order.len() == files.open.len());
        let text = fs::read_to_string(files.folder().join("rank-299.gen-1.stdout")).unwrap();
        assert_eq!(text, "299.0 299.1 299.2 ");
        let again = Files::create(&jobs(dir.path()), JobId(1), 1).unwrap_err();
        assert_eq!(again.kind(), io::ErrorKind::AlreadyExists);
        fs::write(files.folder().join("rank-001.gen-2.stdout"), "theirs").unwrap();
        assert!(files.write(&head(1, 2, Stdio::Stdout), b"x").is_err());
    }

    #[test]
    fn a_folder_that_can_t_be_used_is_known_before() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("a/b");
        try_to_prepare(Some(&jobs(&folder))).unwrap();
        assert!(!dir.path().join("a").exists());
        prepare(Some(&jobs(&folder))).unwrap();
        // What was there stays.
        try_to_prepare(Some(&jobs(&folder))).unwrap();
        assert!(folder.is_dir());
        assert!(dir.path().join("a/b").is_dir());
        fs::write(dir.path().join("file"), "").unwrap();
        let error = prepare(Some(&jobs(&dir.path().join("file")))).unwrap_err();
        assert!(error.to_string().ends_with("/file: it is no directory"));
        prepare(Some(&jobs(&dir.path().join("file/x")))).unwrap_err();
        prepare(Some(&jobs(Path::new("/proc/nothing")))).unwrap_err();
    }

    #[test]
    fn one_rank_has_one_digit() {
        assert_eq!(name((1, 0, Stdio::Stdout), 1), "rank-0.gen-1.stdout");
        let dir = tempfile::tempdir().unwrap();
        let files = Files::create(&jobs(dir.path()), JobId(1), 1).unwrap();
        assert!(files.folder().join("rank-0.gen-1.stderr").exists());
        let files = Files::create(&jobs(dir.path()), JobId(2), 10).unwrap();
        assert!(files.folder().join("rank-9.gen-1.stderr").exists());
    }
}
