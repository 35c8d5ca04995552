//! Merges the spans of all processes to one Chrome trace, which opens in Perfetto.
//!
//! In: `OUT/trace/ROLE-INDEX-INCARNATION.jsonl`, a span a line, times in microseconds of the machine's
//! monotonic clock. Out: one file of the trace event format, a process per worker, a thread per track,
//! time from the first span.
//!
//! Spans are streamed: a long trace needs no memory. What a killed process left of its last line is
//! passed over.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead as _, BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};

use cadre_supervisor::{Role, WorkerName};
use serde::{Deserialize, Serialize};

use super::{Error, whole};

/// What a run makes in its directory.
const OWN: [&str; 9] = [
    "checkpoints",
    "headers.jsonl",
    "logs",
    "picture.svg",
    "processes.json",
    "servers.jsonl",
    "steps.jsonl",
    "summary.json",
    "trace",
];

/// Where workers put their spans.
pub(crate) fn folder(out: &Path) -> PathBuf {
    out.join("trace")
}

/// Refuses a file that is there already, or that cannot be made.
pub(crate) fn check(file: &Path, out: &Path) -> Result<(), Error> {
    if file.symlink_metadata().is_ok() {
        return Err(Error::TraceExists { path: file.to_path_buf() });
    }
    let parent = file.parent().filter(|it| !it.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // A directory that the run is about to make will do.
    if parent.is_dir() || parent == out {
        return Ok(());
    }
    let source = std::io::Error::from(std::io::ErrorKind::NotFound);
    Err(Error::file("write", file, source))
}

/// Refuses a file that a run in `out` makes itself, or has its own files in. `out` is there.
pub(crate) fn check_name(file: &Path, out: &Path) -> Result<(), Error> {
    let parent = file.parent().filter(|it| !it.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let whole = |path: &Path| std::fs::canonicalize(path).ok();
    // A file whose folder is not there has been refused.
    let (Some(parent), Some(out)) = (whole(parent), whole(out)) else { return Ok(()) };
    let found = parent.join(file.file_name().unwrap_or_default());
    let inside = found.strip_prefix(&out).ok().and_then(|it| it.iter().next()?.to_str());
    if out.starts_with(&found) || inside.is_some_and(|it| OWN.contains(&it)) {
        return Err(Error::TraceIsOwn { path: file.to_path_buf() });
    }
    Ok(())
}

/// Forgets the spans of an earlier run in the same directory.
pub(crate) fn clear(out: &Path) -> Result<(), Error> {
    let folder = folder(out);
    match std::fs::remove_dir_all(&folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(Error::file("remove", &folder, error))
        }
        _ => Ok(()),
    }
}

/// Writes the trace of these workers and says how many spans it has.
pub(crate) fn merge(out: &Path, workers: &[WorkerName], to: &Path) -> Result<u64, Error> {
    let mut first = u64::MAX;
    for &worker in workers {
        spans(out, worker, |span| {
            first = first.min(span.ts_us);
            Ok(())
        })?;
    }
    let mut count = 0;
    whole::write_with(to, |file| {
        let mut trace = Trace { file: BufWriter::new(file), empty: true };
        trace.file.write_all(b"{\"displayTimeUnit\":\"ms\",\"traceEvents\":[")?;
        for (&worker, pid) in workers.iter().zip(1..) {
            count += trace.process(out, worker, pid, first)?;
        }
        trace.file.write_all(b"\n]}\n")?;
        trace.file.flush()
    })?;
    Ok(count)
}

/// A line of a worker's file.
#[derive(Debug, Deserialize)]
struct Span {
    name: String,
    ts_us: u64,
    dur_us: u64,
    track: String,
    #[serde(default)]
    args: String,
}

/// An event of the trace event format.
#[derive(Serialize)]
struct Event<'a> {
    name: &'a str,
    ph: &'a str,
    pid: u32,
    tid: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    ts: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dur: Option<u64>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    args: BTreeMap<&'a str, &'a str>,
}

struct Trace<W: Write> {
    file: W,
    empty: bool,
}

impl<W: Write> Trace<W> {
    fn process(
        &mut self,
        out: &Path,
        worker: WorkerName,
        pid: u32,
        first: u64,
    ) -> std::io::Result<u64> {
        self.label("process_name", pid, 0, &worker.to_string())?;
        let (mut tracks, mut count) = (BTreeMap::<String, u32>::new(), 0);
        spans(out, worker, |span| {
            let next = tracks.len() as u32 + 1;
            let tid = *tracks.entry(span.track.clone()).or_insert(next);
            if tid == next {
                self.label("thread_name", pid, tid, &span.track)?;
            }
            count += 1;
            self.event(&Event {
                name: &span.name,
                ph: "X",
                pid,
                tid,
                ts: Some(span.ts_us.saturating_sub(first)),
                dur: Some(span.dur_us),
                args: [("detail", span.args.as_str())]
                    .into_iter()
                    .filter(|it| !it.1.is_empty())
                    .collect(),
            })
        })
        .map_err(std::io::Error::other)?;
        Ok(count)
    }

    fn label(&mut self, what: &str, pid: u32, tid: u32, name: &str) -> std::io::Result<()> {
        let args = BTreeMap::from([("name", name)]);
        self.event(&Event { name: what, ph: "M", pid, tid, ts: None, dur: None, args })
    }

    fn event(&mut self, event: &Event<'_>) -> std::io::Result<()> {
        self.file.write_all(if self.empty { b"\n" } else { b",\n" })?;
        self.empty = false;
        serde_json::to_writer(&mut self.file, event).map_err(std::io::Error::from)
    }
}

/// Calls `each` for every whole span of a worker; one that left none has been killed early.
fn spans(
    out: &Path,
    worker: WorkerName,
    mut each: impl FnMut(Span) -> std::io::Result<()>,
) -> Result<(), Error> {
    let role = match worker.role {
        Role::Trainer => "trainer",
        Role::Server => "server",
    };
    let name = format!("{role}-{}-{}.jsonl", worker.index, worker.incarnation);
    let path = folder(out).join(name);
    let failed = |source| Error::file("read", &path, source);
    let file = match File::open(&path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(failed(error)),
    };
    for line in BufReader::new(file).split(b'\n') {
        if let Ok(span) = serde_json::from_slice(&line.map_err(failed)?) {
            each(span).map_err(failed)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn processes_become_one_trace_and_cut_lines_are_passed_over() {
        let out = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder(out.path())).unwrap();
        let write = |name: &str, text: &str| {
            std::fs::write(folder(out.path()).join(name), text).unwrap();
        };
        write(
            "trainer-0-0.jsonl",
            "{\"name\":\"linear\",\"ts_us\":1010,\"dur_us\":5,\"track\":\"main\"}\n\
             {\"name\":\"pull\",\"ts_us\":1012,\"dur_us\":1,\"track\":\"io\",\"args\":\"step 0\"}\n\
             {\"name\":\"wait\",\"ts_us\":1015,\"du",
        );
        write(
            "server-1-2.jsonl",
            "{\"name\":\"launch\",\"ts_us\":1000,\"dur_us\":7,\"track\":\"compute\"}\n",
        );
        let worker = |role, index, incarnation| WorkerName { role, index, incarnation };
        let workers =
            [worker(Role::Trainer, 0, 0), worker(Role::Server, 1, 2), worker(Role::Server, 0, 0)];
        let file = out.path().join("trace.json");
        assert_eq!(merge(out.path(), &workers, &file).unwrap(), 3);
        let trace: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        let label = |name, pid, tid, text| json!({"name": name, "ph": "M", "pid": pid, "tid": tid, "args": {"name": text}});
        let expected = json!([
            label("process_name", 1, 0, "trainer 0"),
            label("thread_name", 1, 1, "main"),
            {"name": "linear", "ph": "X", "pid": 1, "tid": 1, "ts": 10, "dur": 5},
            label("thread_name", 1, 2, "io"),
            {"name": "pull", "ph": "X", "pid": 1, "tid": 2, "ts": 12, "dur": 1,
             "args": {"detail": "step 0"}},
            label("process_name", 2, 0, "server 1 (incarnation 2)"),
            label("thread_name", 2, 1, "compute"),
            {"name": "launch", "ph": "X", "pid": 2, "tid": 1, "ts": 0, "dur": 7},
            label("process_name", 3, 0, "server 0"),
        ]);
        assert_eq!(trace["traceEvents"], expected);
    }

    #[test]
    fn files_of_the_user_are_not_overwritten() {
        let out = tempfile::tempdir().unwrap();
        let file = out.path().join("trace.json");
        check(&file, out.path()).unwrap();
        std::fs::write(&file, "mine").unwrap();
        let error = check(&file, out.path()).unwrap_err().to_string();
        assert!(error.ends_with("exists; remove it or name another file with --trace"), "{error}");
        let error = check(&out.path().join("no/trace.json"), out.path()).unwrap_err().to_string();
        assert!(error.contains("name a directory that exists"), "{error}");
    }

    #[test]
    fn names_of_the_run_itself_are_no_traces() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("runs/o");
        std::fs::create_dir_all(out.join("logs")).unwrap();
        std::os::unix::fs::symlink(&out, folder.path().join("link")).unwrap();
        for name in OWN.iter().chain(&["logs/t.json", "logs/../steps.jsonl"]) {
            for file in [out.join(name), folder.path().join("link").join(name)] {
                let error = check_name(&file, &out).unwrap_err().to_string();
                let expected =
                    "is a name that the run itself makes; name another file with --trace";
                assert!(error.ends_with(expected), "{error}");
            }
        }
        for file in [&out, &out.join("."), &folder.path().join("runs")] {
            check_name(file, &out).unwrap_err();
        }
        for name in ["runs/o/trace.json", "runs/o.json", "runs/trace", "link/t.json"] {
            check_name(&folder.path().join(name), &out).unwrap();
        }
    }
}
