//! What the trainers of the bench hold, and how much memory it had.

use cadre_planner::{Document, Layout, Mask};
use cadre_step::envelope::{Lengths, NanoLengths};

/// What each trainer holds of a step: documents of 16 to 2,015 rows, end to end over all of them.
pub(crate) fn told(step: u64, trainers: u16, nanos: u32, documents: u32) -> Vec<Lengths> {
    let mut told = vec![Lengths { step, turns: None, nanos: Vec::new() }; trainers.into()];
    for nano in 0..nanos {
        let rows: Vec<u32> = (0..documents)
            .map(|it| 16 + (it * 7 + nano).wrapping_mul(2_654_435_761) % 2_000)
            .collect();
        let sum: u64 = rows.iter().map(|it| u64::from(*it)).sum();
        let own = u32::try_from(sum.div_ceil(trainers.into())).expect("a rank's rows are few");
        let document = |&rows: &u32| Document { rows, mask: Mask::Causal };
        let layout = Layout::end_to_end(rows.iter().map(document).collect(), own);
        let layout = layout.expect("documents fill the ranks");
        let empty = Vec::new();
        for (index, told) in told.iter_mut().enumerate() {
            let stretches = layout.ranks().get(index).unwrap_or(&empty).clone();
            let whole = |it: u32| (it, rows[it as usize]);
            let documents = stretches.iter().map(|it| whole(it.document.0)).collect();
            told.nanos.push(NanoLengths { documents, stretches });
        }
    }
    told
}

/// The most memory that this process had, in MiB: inputs of the bench among it.
pub(crate) fn most_memory() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|it| it.strip_prefix("VmHWM:"));
    let kibibytes = line.and_then(|it| it.trim().trim_end_matches(" kB").parse::<f64>().ok());
    kibibytes.unwrap_or(f64::NAN) / 1024.0
}
