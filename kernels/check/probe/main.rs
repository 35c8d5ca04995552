//! `cadre-gpu-probe`: every GPU kernel once against f64, and times of its forms, in a process that needs no Python.
//!
//! Usage: cadre-gpu-probe --part PART --lines FILE [--seed N] [--done I,…] [--form DIR] [--forms DIR] [--patience SECONDS]
//!        [--at WHAT:ROW:HEAD:COLUMN,…] [--case FILE] [--kernels NAME,…] [--bad NAME,…] [--profile] [--dry]
//! PART: `smoke`, every kernel and one time of head dim 128; `probe KERNEL`, that kernel alone; `time`, the time alone; `forms`,
//! times of the forms that the folders below `--forms` hold, beside those of this build; `given`, one number from the inputs of
//! `--case`.
//!
//! In: a GPU by the driver library that the process finds. Out: lines of JSON, appended to FILE one by one, as `bench/gpu` reads
//! them: units begun and done, rows, and of a wrong result the first wrong element with its tile and operands; of a launch that
//! does not end, where every warp waits, if `--form` names kernels that tell. `--at` adds numbers of the results.
//!
//! It judges nothing but correctness and repeats nothing. Exit code 3: no GPU that the kernels are for; 5: the GPU's context is
//! lost; 6: a launch does not end; 7: FILE cannot be written. Invariant: inputs depend on the seed and the unit alone, so another driver gets the same.

mod case;
mod compare;
mod copies;
mod forms;
mod given;
mod lines;
mod smoke;
mod timing;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use cadre_kernels::device::{Error, Gpu};
use serde_json::json;

use lines::Lines;

/// What the caller asks for.
struct Options {
    part: String,
    seed: u64,
    done: Vec<usize>,
    form: Option<PathBuf>,
    forms: Option<PathBuf>,
    patience: Duration,
    at: Vec<String>,
    case: Option<PathBuf>,
    /// Units of other kernels are left out; none are where it is empty.
    kernels: Vec<String>,
    /// Kernels that hang or fault: a unit that launches one is left out.
    bad: Vec<String>,
    /// No gate before runs: a profiler lets one kernel run at a time, and waits for it.
    profile: bool,
    /// The GPU is emulated: small shapes, few runs.
    tiny: bool,
}

/// Why a unit ended without its rows.
enum Trouble {
    /// A launch does not end.
    Hangs,
    Failed(Error),
}

impl From<Error> for Trouble {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

const NO_GPU: u8 = 3;
const LOST: u8 = 5;
const HANGS: u8 = 6;
const NO_ROOM: u8 = 7;

fn options() -> Result<(Options, PathBuf), String> {
    let mut options = Options {
        part: String::new(),
        seed: 1,
        done: Vec::new(),
        form: None,
        forms: None,
        patience: Duration::from_secs(5),
        at: Vec::new(),
        case: None,
        kernels: Vec::new(),
        bad: Vec::new(),
        profile: false,
        tiny: false,
    };
    let mut lines = None;
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        if word == "--dry" {
            options.tiny = true;
            continue;
        }
        if word == "--profile" {
            options.profile = true;
            continue;
        }
        let value = words.next().ok_or_else(|| format!("{word} wants a value"))?;
        let number = || value.parse::<u64>().map_err(|_| format!("{word} {value} is no number"));
        match word.as_str() {
            "--part" => options.part = value,
            "--lines" => lines = Some(PathBuf::from(value)),
            "--seed" => options.seed = number()?,
            "--done" => {
                let number = |it: &str| it.parse().map_err(|_| format!("--done {it} is no unit"));
                options.done = value.split(',').map(number).collect::<Result<_, _>>()?;
            }
            "--form" => options.form = Some(value.into()),
            "--forms" => options.forms = Some(value.into()),
            "--patience" => options.patience = Duration::from_secs(number()?),
            "--at" => options.at = value.split(',').map(str::to_owned).collect(),
            "--case" => options.case = Some(value.into()),
            "--kernels" => options.kernels = value.split(',').map(str::to_owned).collect(),
            "--bad" => options.bad = value.split(',').map(str::to_owned).collect(),
            // Options that other parts of the check read.
            "--broken" | "--packages" | "--peak" => {}
            _ => {
                return Err(format!(
                    "{word} is unknown; see the head of kernels/check/probe/main.rs"
                ));
            }
        }
    }
    Ok((options, lines.ok_or("--lines FILE is missing")?))
}

fn main() -> ExitCode {
    let opened = options().and_then(|(options, path)| Ok((options, Lines::append(&path)?)));
    let (options, mut lines) = match opened {
        Ok(both) => both,
        Err(why) => {
            eprintln!("error: {why}");
            return ExitCode::FAILURE;
        }
    };
    lines.tell(&json!({"at": "the driver"}));
    let gpu = match &options.form {
        Some(folder) => Gpu::open_form(0, folder),
        None => Gpu::open(0),
    };
    let gpu = match gpu {
        Ok(gpu) => gpu,
        Err(why) => {
            println!("{why}");
            lines.tell(&json!({"refused": why.to_string()}));
            return ExitCode::from(NO_GPU);
        }
    };
    let facts = json!({"device": gpu.name(), "uuid": gpu.uuid(), "processors": gpu.processors()});
    lines.tell(&json!({"facts": facts}));
    let done = match options.part.as_str() {
        "forms" => forms::run(&gpu, &options, &mut lines),
        "given" => given::run(&gpu, &options, &mut lines),
        _ => smoke::run(&gpu, &options, &mut lines),
    };
    // Freeing the GPU's memory would wait for a kernel that hangs, so it is leaked.
    std::mem::forget(gpu);
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(Trouble::Hangs) => leave(HANGS),
        Err(Trouble::Failed(why)) => {
            println!("{why}");
            leave(if why.is_lost() { LOST } else { 1 })
        }
    }
}

/// Without what the driver does at the end of a process: it may wait for what never ends.
#[allow(unsafe_code)]
fn leave(code: u8) -> ! {
    use std::io::Write as _;
    unsafe extern "C" {
        fn _exit(code: i32) -> !;
    }
    let _ = std::io::stdout().flush();
    // SAFETY: ends the process, and reads nothing of it.
    unsafe { _exit(code.into()) }
}
