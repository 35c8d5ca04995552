//! Every kernel once, on documents of every edge, against f64; and one time of head dim 128.
//!
//! In: a GPU, the seed. Out: rows of units, dim 128 first; a unit that hangs or loses the GPU ends the process, and whoever reads
//! goes on behind it with another, to which `--bad` names the kernel: what launches it is left out, so that it is blamed once, and
//! no other kernel for it. Backward takes LSE and Δ of the reference, so it does not need forward.

use cadre_kernels::Heads;
use cadre_kernels::device::{Gpu, Order, Watch};
use serde_json::{Value, json};

use crate::case::{Case, Random, Table, Written};
use crate::lines::Lines;
use crate::{Options, Trouble, compare, copies, timing};

/// Name, and what it runs.
struct Unit {
    name: String,
    kernel: &'static str,
    work: Work,
}

enum Work {
    Forward {
        dim: usize,
        softcap: bool,
    },
    Backward {
        dim: usize,
        softcap: bool,
        order: Order,
    },
    /// dQ in bf16, which rows that stay on the GPU have.
    Finish {
        dim: usize,
    },
    Merge,
    Sink,
    Copies(u64),
    Times(Direction),
}

const FINISH: &str = "cadre_finish_dq";

impl Unit {
    /// Kernels that it launches, its own among them.
    fn launches(&self) -> Vec<String> {
        let of = |pass: &str, dim: usize| format!("cadre_{pass}_{dim}");
        let mut all = match self.work {
            Work::Merge | Work::Sink | Work::Times(Direction::Forward) => vec![of("forward", 128)],
            Work::Times(Direction::Backward) => vec![of("forward", 128), FINISH.to_owned()],
            Work::Backward { .. } => vec![FINISH.to_owned()],
            Work::Finish { dim } => vec![of("backward", dim)],
            Work::Forward { .. } | Work::Copies(_) => Vec::new(),
        };
        all.push(self.kernel.to_owned());
        all
    }
}

/// Which of the two kernels of head dim 128 is timed.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Direction {
    Forward,
    Backward,
}

fn units(options: &Options) -> Vec<Unit> {
    const FORWARD: [[&str; 3]; 2] = [
        ["cadre_forward_128", "cadre_forward_64", "cadre_forward_256"],
        ["cadre_forward_128_softcap", "cadre_forward_64_softcap", "cadre_forward_256_softcap"],
    ];
    const BACKWARD: [[&str; 3]; 2] = [
        ["cadre_backward_128", "cadre_backward_64", "cadre_backward_256"],
        ["cadre_backward_128_softcap", "cadre_backward_64_softcap", "cadre_backward_256_softcap"],
    ];
    let mut all = Vec::new();
    let mut unit = |name: String, kernel, work| all.push(Unit { name, kernel, work });
    for softcap in [false, true] {
        let words = if softcap { ", softcap" } else { "" };
        for (index, dim) in [128, 64, 256].into_iter().enumerate() {
            let forward = Work::Forward { dim, softcap };
            unit(format!("forward d{dim}{words}"), FORWARD[usize::from(softcap)][index], forward);
            let backward = Work::Backward { dim, softcap, order: Order::Fixed };
            let kernel = BACKWARD[usize::from(softcap)][index];
            unit(format!("backward d{dim}{words}, and finish_dq"), kernel, backward);
        }
        if !softcap {
            let (dim, order) = (128, Order::Arrival);
            let work = Work::Backward { dim, softcap, order };
            unit("backward d128, dQ in order of arrival".into(), "cadre_backward_128", work);
            for dim in [128, 64, 256] {
                unit(format!("finish_dq d{dim} in bf16"), FINISH, Work::Finish { dim });
            }
            unit("merge of segments".into(), "cadre_merge", Work::Merge);
            unit("sinks".into(), "cadre_sink", Work::Sink);
            unit("copies of words of 16 bytes".into(), "cadre_copy_rows_16", Work::Copies(16));
            unit("copies of words of 4 bytes".into(), "cadre_copy_rows_4", Work::Copies(4));
            let (forward, backward) = (Direction::Forward, Direction::Backward);
            unit("time of d128 forward".into(), "cadre_forward_128", Work::Times(forward));
            unit("time of d128 backward".into(), "cadre_backward_128", Work::Times(backward));
        }
    }
    if let Some(kernel) = options.part.strip_prefix("probe ") {
        // No emulated GPU ends a time of that size; a number of results is not in it.
        let is_timed = options.at.is_empty();
        all.retain(|it| it.kernel == kernel && (is_timed || !matches!(it.work, Work::Times(_))));
    }
    if options.part == "time" {
        all.retain(|it| matches!(it.work, Work::Times(_)));
    }
    if !options.kernels.is_empty() {
        all.retain(|it| options.kernels.iter().any(|name| name == it.kernel || *name == it.name));
    }
    all
}

pub(crate) fn run(gpu: &Gpu, options: &Options, lines: &mut Lines) -> Result<(), Trouble> {
    let units = units(options);
    if units.is_empty() {
        println!("no part is called {:?}", options.part);
    }
    // Made before any launch: a module's pointer is read when a kernel waits too long.
    let watch = Watch::new(gpu)?;
    for (index, unit) in units.iter().enumerate().filter(|(it, _)| !options.done.contains(it)) {
        let bad: Vec<_> =
            unit.launches().into_iter().filter(|it| options.bad.contains(it)).collect();
        if !bad.is_empty() {
            let why = format!("{} hangs or faults", bad.join(", "));
            lines.tell(&json!({"not_run": unit.name, "why": why}));
            continue;
        }
        lines.tell(&json!({"begun": index, "name": unit.name, "kernel": unit.kernel}));
        let done = one(gpu, options, unit, lines);
        match done {
            Ok(()) => lines.tell(&json!({"done": index})),
            Err(trouble) => {
                tell_trouble(&trouble, unit.kernel, watch.as_ref(), lines);
                std::mem::forget(watch);
                return Err(trouble);
            }
        }
    }
    Ok(())
}

/// What ended a unit of `kernel`; where its warps wait, if it is built to tell.
pub(crate) fn tell_trouble(
    trouble: &Trouble,
    kernel: &str,
    watch: Option<&Watch>,
    lines: &mut Lines,
) {
    let told = watch.and_then(|it| it.told(kernel));
    if let Some(told) = told {
        let warp = |it: &cadre_kernels::device::WaitingWarp| json!({"block": it.block, "warp": it.warp, "waits_for": it.waits_for});
        let places: Vec<Value> = told.places.iter().map(warp).collect();
        let (block, thread) = told.first;
        lines.tell(&json!({"waits": {"kernel": kernel, "block": block, "thread": thread, "warps": places}}));
    }
    let words = match trouble {
        Trouble::Hangs => "the launch does not end".to_owned(),
        Trouble::Failed(why) => why.to_string(),
    };
    lines.tell(
        &json!({"raised": words, "kernel": kernel, "hangs": matches!(trouble, Trouble::Hangs)}),
    );
}

/// Heads of a dim: more than one of each, so that a wrong head shows.
pub(crate) fn heads(dim: usize) -> Heads {
    Heads { query: if dim == 256 { 2 } else { 4 }, kv: if dim == 256 { 1 } else { 2 }, dim }
}

fn one(gpu: &Gpu, options: &Options, unit: &Unit, lines: &mut Lines) -> Result<(), Trouble> {
    let (seed, tiny) = (options.seed, options.tiny);
    let names = (unit.name.as_str(), unit.kernel);
    match unit.work {
        Work::Forward { dim, softcap } => {
            let case = Case::new(heads(dim), softcap.then_some(2.0), seed, tiny);
            forward(gpu, options, names, (&case, &[]), lines).map(drop)
        }
        Work::Merge => {
            let mut case = Case::new(heads(128), None, seed, tiny);
            case.segment = Some(128);
            forward(gpu, options, names, (&case, &[]), lines).map(drop)
        }
        Work::Sink => {
            let case = Case::new(heads(128), None, seed, tiny);
            let mut random = Random::new(seed);
            let sinks: Vec<f32> =
                random.numbers(case.heads.query).iter().map(|it| it.to_f32() * 3.0).collect();
            forward(gpu, options, names, (&case, &sinks), lines).map(drop)
        }
        Work::Backward { dim, softcap, order } => {
            let case = Case::new(heads(dim), softcap.then_some(2.0), seed, tiny);
            backward(gpu, options, (&unit.name, unit.kernel), &case, order, lines).map(|_| ())
        }
        Work::Finish { dim } => {
            // Rows are processed in tiles of 64: a longer document adds no further kind of edge.
            let case = Case::new(heads(dim), None, seed, true);
            finish(gpu, options, unit, &case, lines)
        }
        Work::Copies(word) => {
            let what = (unit.name.as_str(), unit.kernel, word);
            let row = copies::check(gpu, what, seed, options.patience)?;
            lines.row("checks", &row);
            Ok(())
        }
        Work::Times(direction) => timing::smoke(gpu, options, direction, lines),
    }
}

/// Whether both tables were right.
pub(crate) fn forward(
    gpu: &Gpu,
    options: &Options,
    names: (&str, &str),
    (case, sinks): (&Case, &[f32]),
    lines: &mut Lines,
) -> Result<bool, Trouble> {
    let right = case.right_forward(sinks);
    let ours = case.forward(gpu, sinks, options.patience)?;
    Ok(tell(options, names, case, ours.iter().zip(&right), lines))
}

/// Whether all tables were right.
pub(crate) fn backward(
    gpu: &Gpu,
    options: &Options,
    names: (&str, &str),
    case: &Case,
    order: Order,
    lines: &mut Lines,
) -> Result<bool, Trouble> {
    let [_, lse] = case.right_forward(&[]);
    let (right, delta) = case.right_backward();
    let how = (order, Written::F32);
    let ours = case.backward(gpu, how, (&lse.values, &delta), options.patience)?;
    Ok(tell(options, names, case, ours.iter().zip(&right), lines))
}

/// Checks dQ in bf16 against f64, and its bits against dQ in f32, rounded. Where dQ in f32 is wrong
/// already, `cadre_finish_dq` is not judged.
fn finish(
    gpu: &Gpu,
    options: &Options,
    unit: &Unit,
    case: &Case,
    lines: &mut Lines,
) -> Result<(), Trouble> {
    let backward = format!("cadre_backward_{}", case.heads.dim);
    lines.tell(&json!({"at": format!("{}, {backward}", unit.name), "kernel": backward}));
    let [_, lse] = case.right_forward(&[]);
    let (right, delta) = case.right_backward();
    let sums = (lse.values.as_slice(), delta.as_slice());
    let run = |written| case.backward(gpu, (Order::Fixed, written), sums, options.patience);
    let wide = run(Written::F32)?;
    let of_sums = compare::row(&unit.name, &backward, case, &wide[0], &right[0]);
    if of_sums["passed"] != json!(true) {
        lines.tell(&json!({"not_run": unit.name, "why": format!("dQ of {backward} is wrong")}));
        return Ok(());
    }
    lines.tell(&json!({"at": unit.name, "kernel": unit.kernel}));
    let narrow = run(Written::Bf16)?;
    let names = (unit.name.as_str(), unit.kernel);
    tell(options, names, case, narrow.iter().zip(&right).take(1), lines);
    let row = compare::rounded(&unit.name, unit.kernel, case, &narrow[0], &wide[0]);
    lines.row("checks", &row);
    Ok(())
}

/// Rows of results, and the number that `--at` asks for; whether all are right.
fn tell<'a>(
    options: &Options,
    (check, kernel): (&str, &str),
    case: &Case,
    tables: impl Iterator<Item = (&'a Table<f32>, &'a Table<f64>)>,
    lines: &mut Lines,
) -> bool {
    let mut is_right = true;
    for (ours, right) in tables {
        let row = compare::row(check, kernel, case, ours, right);
        is_right &= row["passed"] == json!(true);
        lines.row("checks", &row);
        for at in &options.at {
            let Some((what, place)) = at.split_once(':').filter(|it| it.0 == ours.what) else {
                continue;
            };
            let place: Vec<usize> = place.split(':').filter_map(|it| it.parse().ok()).collect();
            let [row, head, column] = place[..] else { continue };
            let index = (row * ours.heads + head) * ours.numbers + column;
            let value = ours.values.get(index).map(|it| f64::from(*it).to_string());
            lines.tell(&json!({"value": value, "check": check, "at": format!("{what}:{row}:{head}:{column}")}));
        }
    }
    is_right
}
