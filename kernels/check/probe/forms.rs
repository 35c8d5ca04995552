//! Times of the forms that the build carries, side by side: what each decides is in `bench/gpu/decisions.py`.
//!
//! In: the kernels of this build; folders below `--forms` with others, each named by what is different (that of the watch is none).
//! Out: for head dims 128, 64 and 256 rows of times: forward; backward with dQ in both orders; on all processors and on four
//! fewer. A form is compared with f64 before it is timed; one that is wrong is not.

use std::path::PathBuf;

use cadre_kernels::Heads;
use cadre_kernels::device::{Gpu, Order};
use serde_json::json;

use crate::case::Case;
use crate::lines::Lines;
use crate::timing::{Bed, Pass, row};
use crate::{Options, Trouble, smoke};

/// A form of kernels that only tell where they wait.
const WATCH: &str = "watch";
const BUILT: &str = "as built";

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
    let mut unit = 0;
    for (form, folder) in folders(options) {
        for dim in [128, 64, 256] {
            let (index, name) = (unit, format!("d{dim}, {form}"));
            unit += 1;
            let kernel = format!("cadre_backward_{dim}");
            let wanted = options.kernels.is_empty() || options.kernels.contains(&kernel);
            if options.done.contains(&index) || !wanted {
                continue;
            }
            lines.tell(&json!({"begun": index, "name": name, "kernel": kernel}));
            let done = match &folder {
                None => one(gpu, options, (&form, dim), lines),
                Some(folder) => Gpu::open_form(0, folder)
                    .map_err(Trouble::from)
                    .and_then(|gpu| one(&gpu, options, (&form, dim), lines)),
            };
            if let Err(trouble) = done {
                let words = match &trouble {
                    Trouble::Hangs => "the launch does not end".to_owned(),
                    Trouble::Failed(why) => why.to_string(),
                };
                lines.tell(&json!({"raised": words, "kernel": kernel, "hangs": matches!(trouble, Trouble::Hangs)}));
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
    lines: &mut Lines,
) -> Result<(), Trouble> {
    let case = Case::new(smoke::heads(dim), None, options.seed, true);
    let (name, kernel) = (format!("form {form}, backward d{dim}"), format!("cadre_backward_{dim}"));
    smoke::backward(gpu, options, (&name, &kernel), &case, Order::Fixed, lines)?;
    let (query, kv) = if options.tiny { (2, 1) } else { (64 * 128 / dim.max(128), 8) };
    let (rows, runs) = if options.tiny { (256, 1) } else { (16_384, 7) };
    let mut bed = Bed::new(gpu, Heads { query, kv, dim }, rows, options.seed)?;
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
        let times = bed.times(gpu, (pass, Some(blocks)), runs, options)?;
        for (l2, times) in ["warm", "cold"].into_iter().zip(&times) {
            lines.row("forms", &row(&bed, form, pass, blocks, l2, times));
        }
    }
    Ok(())
}
