//! Times of the forms that the build carries, side by side: what each decides is in `bench/gpu/decisions.py`.
//!
//! In: the kernels of this build; folders below `--forms` with others, each named by what is different (that of the watch is none).
//! Out: for head dims 128, 64 and 256 rows of times: forward; backward with dQ in both orders; on all processors and on four
//! fewer. A form is compared with f64 before it is timed; one that is wrong is not.

use std::mem::ManuallyDrop;
use std::path::PathBuf;

use cadre_kernels::Heads;
use cadre_kernels::device::{Gpu, Order, Watch};
use serde_json::json;

use crate::case::Case;
use crate::lines::Lines;
use crate::timing::{Bed, Pass, row};
use crate::{Options, Trouble, smoke};

/// A form of kernels that only tell where they wait.
const WATCH: &str = "watch";
const BUILT: &str = "as built";
/// A form that changes one head dim alone.
const PANELS: (&str, usize) = ("panels", 64);

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
        for dim in [128, 64, 256] {
            let (index, name) = (unit, format!("d{dim}, {form}"));
            unit += 1;
            let kernel = format!("cadre_backward_{dim}");
            let wanted = options.kernels.is_empty() || options.kernels.contains(&kernel);
            let wanted = wanted && (form != PANELS.0 || dim == PANELS.1);
            if options.done.contains(&index) || !wanted {
                continue;
            }
            lines.tell(&json!({"begun": index, "name": name, "kernel": kernel}));
            let mut launched = kernel;
            let done = match &folder {
                None => one(gpu, options, (&form, dim), &mut launched, lines),
                Some(folder) => {
                    Gpu::open_form(0, folder).map_err(Trouble::from).and_then(|gpu| {
                        let done = one(&gpu, options, (&form, dim), &mut launched, lines);
                        if done.is_err() {
                            // To close it would wait for a launch that does not end.
                            std::mem::forget(gpu);
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

fn one(
    gpu: &Gpu,
    options: &Options,
    (form, dim): (&str, usize),
    launched: &mut String,
    lines: &mut Lines,
) -> Result<(), Trouble> {
    let case = Case::new(smoke::heads(dim), None, options.seed, true);
    let (name, kernel) = (format!("form {form}, backward d{dim}"), format!("cadre_backward_{dim}"));
    if !smoke::backward(gpu, options, (&name, &kernel), &case, Order::Fixed, lines)? {
        lines.tell(&json!({"say": format!("{name}: wrong: not timed")}));
        return Ok(());
    }
    let (query, kv) = if options.tiny { (2, 1) } else { (64 * 128 / dim.max(128), 8) };
    let (rows, runs) = if options.tiny { (256, 1) } else { (16_384, 7) };
    let bed = Bed::new(gpu, Heads { query, kv, dim }, rows, options.seed)?;
    let mut bed = ManuallyDrop::new(bed);
    let all = gpu.processors();
    let (free, fixed) = (Pass::Backward(Order::Arrival), Pass::Backward(Order::Fixed));
    // Only backward has forms beside that of the build; fewer blocks are no form of the kernel.
    let built = form == BUILT;
    let passes = [
        (Pass::Forward, all),
        (free, all),
        (fixed, all),
        (Pass::Forward, all - 4.min(all - 1)),
        (fixed, all - 4.min(all - 1)),
    ];
    for (index, (pass, blocks)) in passes.into_iter().enumerate() {
        // LSE is wanted by all that follow.
        if !built && index > 2 {
            break;
        }
        *launched = pass.kernel(dim);
        let at = format!("d{dim}, {form}, time of {launched}, {blocks} blocks");
        lines.tell(&json!({"at": at, "kernel": launched}));
        let times = bed.times(gpu, (pass, Some(blocks)), runs, options)?;
        for (l2, times) in ["warm", "cold"].into_iter().zip(&times) {
            lines.row("forms", &row(&bed, form, pass, blocks, l2, times));
        }
    }
    drop(ManuallyDrop::into_inner(bed));
    Ok(())
}
