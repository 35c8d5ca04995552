//! Times of the forms that the build carries, side by side: what each decides is in `bench/gpu/decisions.py`.
//!
//! In: the kernels of this build; folders below `--forms` with others, each named by what is different (that of the watch is none).
//! Out: for head dims 128, 64 and 256 rows of times: forward; backward with dQ in both orders; on all processors and on four
//! fewer. What is compared takes turns, another form with the build's own beside it; a row has the median of each round, and of
//! a form also that of the build's own. A form is compared with f64 before it is timed; one that is wrong is not.

use std::mem::ManuallyDrop;
use std::path::PathBuf;

use cadre_kernels::Heads;
use cadre_kernels::device::{Family, Gpu, Order, Watch};
use serde_json::{Value, json};

use crate::case::Case;
use crate::lines::Lines;
use crate::timing::{Bed, Pass, row};
use crate::{Options, Trouble, smoke};

/// The form whose kernels report where they wait; it is not timed.
const WATCH: &str = "watch";
const BUILT: &str = "as built";
/// Rounds; in each, all forms that are compared are timed once, in turn.
const ROUNDS: usize = 5;
/// Forms that change one head dim alone, and which.
const OF_ONE: [(&str, usize); 3] = [("panels", 64), ("later", 128), ("tall", 64)];
/// The form that changes forward; others change backward.
const OF_FORWARD: &str = "tall";
/// Forms that are launched otherwise than the build's own.
const LAUNCHED_OTHERWISE: [&str; 2] = ["later", "tall"];

fn folders(options: &Options) -> Vec<(String, Option<PathBuf>)> {
    let mut all = Vec::new();
    if let Some(entries) = options.forms.as_ref().and_then(|it| std::fs::read_dir(it).ok()) {
        for path in entries.flatten().map(|it| it.path()).filter(|it| it.is_dir()) {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            all.push((name, Some(path)));
        }
    }
    all.sort();
    all.retain(|it| it.0 != WATCH);
    all.insert(0, (BUILT.to_owned(), None));
    all
}

pub(crate) fn run(gpu: &Gpu, options: &Options, lines: &mut Lines) -> Result<(), Trouble> {
    let watch = Watch::new(gpu)?;
    let mut unit = 0;
    for (form, folder) in folders(options) {
        if form != BUILT && gpu.family() == Family::Portable {
            lines.tell(&json!({"not_run": form, "why": "a form of the kernels for Hopper; this GPU runs the portable ones"}));
            continue;
        }
        if options.tiny && LAUNCHED_OTHERWISE.contains(&form.as_str()) {
            let why = "the emulated driver has the kernels as built alone; the test `emulation` runs this form";
            lines.tell(&json!({"not_run": form, "why": why}));
            continue;
        }
        for dim in [128, 64, 256] {
            let (index, name) = (unit, format!("d{dim}, {form}"));
            unit += 1;
            // Head dims are asked for by their backward kernels.
            let kernel = changed(BUILT, dim).1;
            let wanted = options.kernels.is_empty() || options.kernels.contains(&kernel);
            let wanted = wanted && OF_ONE.iter().all(|it| form != it.0 || dim == it.1);
            if options.done.contains(&index) || !wanted {
                continue;
            }
            lines.tell(&json!({"begun": index, "name": name, "kernel": changed(&form, dim).1}));
            let mut launched = changed(&form, dim).1;
            let done = match &folder {
                None => one((gpu, gpu), options, (&form, dim), &mut launched, lines),
                Some(folder) => {
                    Gpu::open_form(0, folder).map_err(Trouble::from).and_then(|of| {
                        let done = one((&of, gpu), options, (&form, dim), &mut launched, lines);
                        if done.is_err() {
                            // To close it would wait for a launch that does not end.
                            std::mem::forget(of);
                        }
                        done
                    })
                }
            };
            if let Err(trouble) = done {
                smoke::tell_trouble(&trouble, &launched, watch.as_ref(), lines);
                std::mem::forget(watch);
                return Err(trouble);
            }
            lines.tell(&json!({"done": index}));
        }
    }
    Ok(())
}

/// The direction and the kernel that a form changes.
fn changed(form: &str, dim: usize) -> (&'static str, String) {
    let direction = if form == OF_FORWARD { "forward" } else { "backward" };
    (direction, format!("cadre_{direction}_{dim}"))
}

fn one(
    (gpu, built): (&Gpu, &Gpu),
    options: &Options,
    (form, dim): (&str, usize),
    launched: &mut String,
    lines: &mut Lines,
) -> Result<(), Trouble> {
    let case = Case::new(smoke::heads(dim), None, options.seed, true);
    let (direction, kernel) = changed(form, dim);
    let name = format!("form {form}, {direction} d{dim}");
    let names = (name.as_str(), kernel.as_str());
    let is_right = if form == OF_FORWARD {
        smoke::forward(gpu, options, names, (&case, &[]), lines)?
    } else {
        smoke::backward(gpu, options, names, &case, Order::Fixed, lines)?
    };
    if !is_right {
        lines.tell(&json!({"say": format!("{name}: wrong: not timed")}));
        return Ok(());
    }
    let (query, kv) = if options.tiny { (2, 1) } else { (64 * 128 / dim.max(128), 8) };
    let (rows, runs) = if options.tiny { (256, 1) } else { (16_384, 3) };
    let shape = Heads { query, kv, dim };
    // The form and the kernels as built stay in memory side by side, so that their runs can
    // alternate.
    let mut beds = vec![(gpu, ManuallyDrop::new(Bed::new(gpu, shape, rows, options.seed)?))];
    if form != BUILT {
        beds.push((built, ManuallyDrop::new(Bed::new(built, shape, rows, options.seed)?)));
    }
    let all = gpu.processors();
    let fewer = all - 4.min(all - 1);
    let (free, fixed) = (Pass::Backward(Order::Arrival), Pass::Backward(Order::Fixed));
    // Fewer blocks are no form of a kernel.
    let turns = if form == BUILT {
        vec![
            (0, Pass::Forward, all),
            (0, free, all),
            (0, fixed, all),
            (0, Pass::Forward, fewer),
            (0, fixed, fewer),
        ]
    } else if form == OF_FORWARD {
        vec![(0, Pass::Forward, all), (1, Pass::Forward, all)]
    } else {
        vec![(0, free, all), (1, free, all), (0, fixed, all), (1, fixed, all)]
    };
    for (gpu, bed) in &mut beds {
        // A backward pass wants LSE.
        *launched = Pass::Forward.kernel(dim);
        lines.tell(&json!({"at": format!("d{dim}, {form}, {launched}"), "kernel": launched}));
        bed.once(gpu, Pass::Forward, options)?;
    }
    let mut times = vec![[Vec::new(), Vec::new()]; turns.len()];
    let mut without_host = true;
    for round in 1..=if options.tiny { 2 } else { ROUNDS } {
        for (index, &(bed, pass, blocks)) in turns.iter().enumerate() {
            *launched = pass.kernel(dim);
            let at = format!("d{dim}, {form}, round {round}, time of {launched}, {blocks} blocks");
            lines.tell(&json!({"at": at, "kernel": launched}));
            let (gpu, bed) = &mut beds[bed];
            let found = bed.times(gpu, (pass, Some(blocks)), runs, options)?;
            without_host &= bed.without_host;
            for (of, found) in times[index].iter_mut().zip(found) {
                of.push(found);
            }
        }
    }
    for (index, &(bed, pass, blocks)) in turns.iter().enumerate().filter(|(_, it)| it.0 == 0) {
        for (at, l2) in ["warm", "cold"].into_iter().enumerate() {
            let all: Vec<f64> = times[index][at].concat();
            let mut row = row(&beds[bed].1, form, pass, blocks, l2, &all);
            row["without_host"] = json!(without_host);
            row["rounds"] = medians(&times[index][at]);
            if form != BUILT {
                row["base_rounds"] = medians(&times[index + 1][at]);
            }
            lines.row("forms", &row);
        }
    }
    for (_, bed) in beds {
        drop(ManuallyDrop::into_inner(bed));
    }
    Ok(())
}

/// The median time of each round.
fn medians(rounds: &[Vec<f64>]) -> Value {
    let median = |round: &Vec<f64>| {
        let mut sorted = round.clone();
        sorted.sort_by(f64::total_cmp);
        sorted.get(sorted.len() / 2).copied()
    };
    json!(rounds.iter().map(median).collect::<Vec<_>>())
}
