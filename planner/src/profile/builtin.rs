//! Tables for the H200 and the H100 that ship with Cadre: from published speeds where none were measured, which each says
//! in its `source`; of `GPU-hopper` what was measured ([`measured`]) stands in for what is planned.
//!
//! * `h200-fa2`: `FlashAttention` 2. TFLOP/s by query rows of a task are those of `DistCA`'s authors (arXiv 2510.18121);
//!   its backward pass is taken to be as fast a pair as four fifths of that.
//! * `h200-hopper`: kernels made for Hopper, as fast as cuDNN 9.19 was measured on an H200 (causal, head dim 128): 688
//!   forward and 581 backward at 32K. Short tasks are taken to lose as much as with `FlashAttention` 2.
//! * `h100-hopper`: the same, since an H100 (SXM) has the processors of an H200, and attention is bound by them.

use super::{Direction, Kept, LinkTimes, Profile, Table, VERSION, measured};

/// Query rows of a task and TFLOP/s of `FlashAttention` 2.
const ROWS: [(u32, u64); 6] = [(16, 41), (32, 80), (64, 154), (128, 289), (256, 297), (512, 305)];
/// More rows, at the last speed.
const LONG: [u32; 3] = [2_048, 8_192, 32_768];
const KEYS: [u32; 5] = [0, 2_048, 16_384, 131_072, 1_048_576];
const HEAD_DIMS: [u16; 3] = [64, 128, 256];

/// Speed of long tasks in TFLOP/s.
struct Speed {
    forward: u64,
    backward: u64,
}

/// Suffix of tables for the kernels of this build, behind the GPU's name.
const OURS: &str = "-hopper";

pub(super) fn profile(name: &str) -> Option<Profile> {
    let planned = planned(name)?;
    let measured = name.strip_suffix(OURS).and_then(measured::profile);
    Some(measured.map_or_else(|| planned.clone(), |it| over(&planned, it)))
}

fn planned(name: &str) -> Option<Profile> {
    let hopper = Speed { forward: 688, backward: 581 };
    let (speed, source) = match name {
        "h200-fa2" => (
            Speed { forward: 305, backward: 244 },
            "published: FlashAttention 2 on H200 by rows (arXiv 2510.18121); backward assumed; not measured here",
        ),
        "h200-hopper" => (
            hopper,
            "planned: cuDNN 9.19 on H200, causal 32K, head dim 128; short tasks as FlashAttention 2; not measured here",
        ),
        "h100-hopper" => {
            (hopper, "planned: as h200-hopper, whose processors are the same; not measured here")
        }
        _ => return None,
    };
    let mut kernels = Vec::new();
    for head_dim in HEAD_DIMS {
        for kept in [Kept::Causal, Kept::Full] {
            kernels.push(table(head_dim, Direction::Forward, kept, speed.forward));
            kernels.push(table(head_dim, Direction::Backward, kept, speed.backward));
        }
    }
    let link =
        |distance: &str, rate, latency| LinkTimes { distance: distance.into(), rate, latency };
    Some(Profile {
        version: VERSION,
        partial: None,
        processor: name.into(),
        source: source.into(),
        // A task of a persistent launch holds up one of 132 multiprocessors for about a microsecond.
        task_nanoseconds: 8,
        // 52 % of 989 TFLOP/s dense bf16.
        linear_operations: 514_000,
        kernels,
        // NVLink; 400 Gbit/s a GPU.
        links: vec![
            link("node", 400_000, 2_000),
            link("rail", 50_000, 5_000),
            link("leaf", 50_000, 6_000),
            link("far", 50_000, 8_000),
        ],
        places: Vec::new(),
        unreachable: Vec::new(),
    })
}

/// The measured profile, completed by the planned one for head dims and links that were not
/// measured.
fn over(planned: &Profile, measured: Profile) -> Profile {
    let source = format!("{}; other head dims and links: {}", measured.source, planned.source);
    let (processor, links) = (planned.processor.clone(), planned.links.clone());
    let mut kernels = planned.kernels.clone();
    kernels.retain(|it| {
        let same = |other: &Table| other.is_for(it.head_dim, it.direction, it.kept);
        !measured.kernels.iter().any(same)
    });
    kernels.extend(measured.kernels);
    Profile { processor, source, kernels, links, ..measured }
}

/// Four operations a pair and element forward, ten backward.
fn table(head_dim: u16, direction: Direction, kept: Kept, most: u64) -> Table {
    let operations = u128::from(head_dim) * if direction == Direction::Forward { 4 } else { 10 };
    let speeds = ROWS.into_iter().chain(LONG.map(|rows| (rows, ROWS[5].1)));
    let time = |rows: u32, keys: u32, speed: u64| {
        let (rows, keys) = (u128::from(rows), u128::from(keys));
        let pairs = match kept {
            Kept::Causal => rows * keys + rows * (rows + 1) / 2,
            Kept::Full => rows * (keys + rows),
        };
        // A TFLOP/s is one operation a picosecond; the speed of long tasks, less as few rows lose.
        (pairs * operations * u128::from(ROWS[5].1)).div_ceil(u128::from(most * speed)) as u64
    };
    let mut picoseconds: Vec<Vec<u64>> = speeds
        .clone()
        .map(|(rows, speed)| KEYS.map(|keys| time(rows, keys, speed)).to_vec())
        .collect();
    // Fewer rows at less speed may take as long as more.
    for row in 1..picoseconds.len() {
        let (before, after) = picoseconds.split_at_mut(row);
        for (time, above) in after[0].iter_mut().zip(&before[row - 1]) {
            *time = (*time).max(*above);
        }
    }
    Table {
        head_dim,
        direction,
        kept,
        rows: speeds.map(|(rows, _)| rows).collect(),
        keys: KEYS.to_vec(),
        picoseconds,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_measured_stands_in_for_what_was_planned() {
        let planned = Profile::builtin("h200-fa2").expect("it is listed");
        let of = |it: &&Table| it.is_for(128, Direction::Forward, Kept::Causal);
        let mut own = planned.kernels.iter().find(of).expect("it is there").clone();
        own.picoseconds.iter_mut().flatten().for_each(|it| *it *= 2);
        let measured = Profile {
            source: "measured".into(),
            kernels: vec![own.clone()],
            links: Vec::new(),
            task_nanoseconds: 77,
            ..planned.clone()
        };
        let both = over(&planned, measured);
        assert_eq!(both.check(), Ok(()));
        assert_eq!(both.table(128, Direction::Forward, Kept::Causal), Ok(&own));
        assert_eq!((both.kernels.len(), both.task_nanoseconds), (planned.kernels.len(), 77));
        assert_eq!(both.links, planned.links);
        assert!(both.source.starts_with("measured; other head dims"), "{}", both.source);
    }

    #[test]
    fn every_gpu_that_is_measured_has_a_planned_table_to_stand_in_for() {
        for gpu in ["h100", "h200"] {
            let name = format!("{gpu}{OURS}");
            assert!(Profile::BUILTIN.contains(&name.as_str()), "{name}");
            let (profile, planned) = (profile(&name), planned(&name));
            let sources = [profile, planned].map(|it| it.expect("it is listed").source);
            assert_eq!(sources[0] == sources[1], measured::profile(gpu).is_none(), "{name}");
        }
    }

    #[test]
    fn tables_that_ship_are_whole_and_as_fast_as_they_say() {
        for name in Profile::BUILTIN {
            let profile = Profile::builtin(name).expect("it is listed");
            assert_eq!(profile.check(), Ok(()), "{name}");
            for head_dim in HEAD_DIMS {
                profile.costs(head_dim).expect("both directions are there");
                // As planned: what is measured one day may be slower or faster.
                let planned = planned(name).expect("it is listed");
                let costs = planned.costs(head_dim).expect("both directions are there");
                assert!((250..=320).contains(&costs.backward_percent), "{name} {costs:?}");
                assert!(costs.tile < 16_384 && costs.task < 1 << 20, "{name} {costs:?}");
            }
            assert!(profile.source.contains("not measured"));
        }
        let fast = planned("h200-hopper").expect("it is listed");
        let table = fast.table(128, Direction::Forward, Kept::Causal).expect("it is there");
        let (rows, keys) = (8_192_u64, 131_072_u64);
        let operations = (rows * keys + rows * (rows + 1) / 2) * 4 * 128;
        let speed = operations / table.picoseconds(rows as u32, keys as u32);
        assert!((680..=690).contains(&speed), "{speed}");
        assert_eq!(Profile::builtin("a100"), None);
    }
}
