//! Launchers: a container whose command starts the ranks of its node by itself, as torchrun does.
//!
//! In: a container's command and arguments, and the exit codes of its ranks. Out: whether it is a launcher, which options belong
//! to the job ([`refused`]), and the exit code of its node (`code_of`). The supervisor starts a launcher once per node. The
//! launcher learns its ranks from variables (`PET_NNODES` and the like).
//!
//! Its options are read as torchrun reads them, including abbreviations. Options behind the script belong to the script.

use std::path::Path;

use cadre_crds::contract::ASKED_TO_END;
use cadre_crds::k8s_openapi::api::core::v1::Container;

use super::exit::BAD_INPUT;

/// Exit code of a rank that stopped because of another one.
const COULD_NOT_GO_ON: i32 = 3;
/// Torchrun as a Python module.
const MODULE: [&str; 2] = ["-m", "torch.distributed.run"];
/// Options without a value.
const FLAGS: &[&str] = &[
    "-m",
    "--duplicate-stderr-filters",
    "--duplicate-stdout-filters",
    "--module",
    "--no-python",
    "--print-completion",
    "--run-path",
    "--standalone",
    "--virtual-local-rank",
];
/// Options for the ranks and their meeting point. The job sets these, so they are refused.
const OF_THE_JOB: &[&str] = &[
    "--master-addr",
    "--master-port",
    "--nnodes",
    "--node-rank",
    "--nproc-per-node",
    "--rdzv-backend",
    "--rdzv-endpoint",
    "--standalone",
];
const MAX_RESTARTS: &str = "--max-restarts";
/// Other options with a value. They decide which abbreviations are unambiguous.
const OTHERS: &[&str] = &[
    "--event-log-handler",
    "--help",
    "--local-addr",
    "--local-ranks-filter",
    "--log-dir",
    "--log-line-prefix-template",
    "--logs-specs",
    "--monitor-interval",
    "--numa-binding",
    "--rdzv-conf",
    "--rdzv-id",
    "--redirects",
    "--role",
    "--shutdown-timeout",
    "--signals-to-handle",
    "--start-method",
    "--tee",
    MAX_RESTARTS,
];
/// The environment variable with the meaning of [`MAX_RESTARTS`].
const PET_MAX_RESTARTS: &str = "PET_MAX_RESTARTS";

/// Command and arguments of a container, in one list.
pub(crate) fn words(container: &Container) -> Vec<String> {
    [&container.command, &container.args].into_iter().flatten().flatten().cloned().collect()
}

/// Whether a container is a launcher.
pub fn is_launcher(container: &Container) -> bool {
    let words = words(container);
    let program = words.first().map(|it| Path::new(it).file_name() == Some("torchrun".as_ref()));
    program.unwrap_or(false) || words.windows(2).any(|it| it == MODULE)
}

/// The exit code that tells why a node ended, where its launcher exited with `own`: torchrun exits with 1 whatever its ranks did.
/// Ranks that left no code, as when they were killed, say nothing more. The cause counts: bad input comes first, and ranks that
/// stopped because of others, or were asked to end, come last.
pub(crate) fn code_of(own: i32, ranks: impl Iterator<Item = Option<i32>>) -> i32 {
    let place = |code: &Option<i32>| match *code {
        Some(BAD_INPUT) => 0,
        None => 2,
        Some(COULD_NOT_GO_ON) => 3,
        Some(code) if code == i32::from(ASKED_TO_END) => 4,
        Some(0) => 5,
        Some(_) => 1,
    };
    let found = ranks.min_by_key(place).flatten();
    if own == 0 { own } else { found.filter(|it| *it != 0).unwrap_or(own) }
}

/// The code that a rank wrote into a folder.
pub(crate) fn left(folder: &Path, rank: u16) -> Option<i32> {
    std::fs::read_to_string(folder.join(rank.to_string())).ok()?.trim().parse().ok()
}

/// An option of a launcher that only the job may decide: what is wrong with it, and the remedy.
pub fn refused(container: &Container) -> Option<(String, &'static str)> {
    if !is_launcher(container) {
        return None;
    }
    let restarts = |name: &str, value: &str| {
        let problem = format!("has {name} {value}: torchrun would restart ranks by itself");
        (value != "0").then_some((problem, "leave it out and set spec.failurePolicy.maxRestarts"))
    };
    let words = words(container);
    let own = words.windows(2).position(|it| it == MODULE).map_or(1, |at| at + MODULE.len());
    let mut rest = words[own..].iter();
    while let Some(word) = rest.next().filter(|it| it.starts_with('-') && *it != "--") {
        let (name, value) = named(word);
        let is_flag = FLAGS.contains(&name.as_str());
        let value = value.or_else(|| if is_flag { None } else { rest.next().map(String::as_str) });
        if OF_THE_JOB.contains(&name.as_str()) {
            let problem = format!("has {name}, which the job says");
            return Some((problem, "leave it out and set spec.nodes and spec.procsPerNode"));
        }
        if name == MAX_RESTARTS
            && let Some(refused) = restarts(&name, value.unwrap_or_default())
        {
            return Some(refused);
        }
    }
    let mut variables = container.env.iter().flatten().filter(|it| it.name == PET_MAX_RESTARTS);
    variables.find_map(|it| restarts(&it.name, it.value.as_deref()?))
}

/// The name of an option, written out, and its value if it is of the same word: `--max-restart=3`, `-r3`.
fn named(word: &str) -> (String, Option<&str>) {
    let is_short = !word.starts_with("--");
    if is_short && let Some((name, value)) = word.split_at_checked(2) {
        return (name.to_owned(), (!value.is_empty()).then_some(value));
    }
    let (name, value) = match word.split_once('=') {
        Some((name, value)) => (name, Some(value)),
        None => (word, None),
    };
    let name = name.replace('_', "-");
    // As in argparse, an unambiguous prefix stands for the option.
    let all = [FLAGS, OF_THE_JOB, OTHERS].into_iter().flatten().copied();
    let mut meant: Vec<&str> = all.filter(|it| it.starts_with(&name)).collect();
    meant.sort_unstable();
    meant.dedup();
    match meant[..] {
        [only] => (only.to_owned(), value),
        _ => (name, value),
    }
}

#[cfg(test)]
mod tests {
    use cadre_crds::k8s_openapi::api::core::v1::EnvVar;

    use super::*;

    fn container(command: &str, args: &str) -> Container {
        let words = |it: &str| Some(it.split_whitespace().map(str::to_owned).collect());
        Container { command: words(command), args: words(args), ..Container::default() }
    }

    #[test]
    fn a_node_ends_with_the_code_of_the_rank_that_is_the_cause() {
        for (own, ranks, expected) in [
            (1, &[Some(3), Some(2)][..], 2),
            (1, &[Some(3), Some(7)], 7),
            (1, &[Some(143), Some(3)], 3),
            (1, &[Some(0), Some(143)], 143),
            // Nothing is known of a rank that was killed.
            (1, &[Some(3), None], 1),
            (1, &[None, Some(2)], 2),
            (1, &[None, Some(42)], 42),
            (1, &[Some(42), None], 42),
            (1, &[Some(0), Some(0)], 1),
            (1, &[], 1),
            (0, &[Some(0), Some(2)], 0),
        ] {
            assert_eq!(code_of(own, ranks.iter().copied()), expected, "{own} {ranks:?}");
        }
    }

    #[test]
    fn torchrun_is_known_by_its_name_and_its_module() {
        for (command, args, expected) in [
            ("torchrun", "train.py", true),
            ("/opt/bin/torchrun train.py", "", true),
            ("python -m torch.distributed.run", "train.py", true),
            ("python train.py", "torchrun", false),
            ("cadre train", "", false),
            ("", "", false),
        ] {
            assert_eq!(is_launcher(&container(command, args)), expected, "{command} {args}");
        }
    }

    #[test]
    fn what_the_job_decides_is_refused_up_to_the_script() {
        let check = |command: &str, args: &str, expected: Option<&str>| {
            let problem = refused(&container(command, args)).map(|(problem, _)| problem);
            assert_eq!(problem.as_deref(), expected, "{command} {args}");
        };
        let restarts =
            |value| format!("has --max-restarts {value}: torchrun would restart ranks by itself");
        check("torchrun", "train.py --nnodes=2 --max-restarts 3", None);
        check("torchrun", "--max-restarts=0 --log-dir --nnodes -m train --nnodes 2", None);
        check("torchrun --max_restarts=3", "train.py", Some(&restarts("3")));
        check("torchrun", "--log-dir=a --max-restarts 1 train.py", Some(&restarts("1")));
        check(
            "torchrun --nproc_per_node",
            "2 train.py",
            Some("has --nproc-per-node, which the job says"),
        );
        check("torchrun", "--standalone train.py", Some("has --standalone, which the job says"));
        check("torchrun", "--max_restart=3 train.py", Some(&restarts("3")));
        check("torchrun --max-r 3", "train.py", Some(&restarts("3")));
        check("torchrun --nn", "2 train.py", Some("has --nnodes, which the job says"));
        check("torchrun", "--stand train.py", Some("has --standalone, which the job says"));
        // A flag that is abbreviated takes no value, and a short option may hold its own.
        check("torchrun", "--no-py train --nnodes 2", None);
        check("torchrun", "-r3 train.py --nnodes 2", None);
        check("torchrun", "-t 3 -- train.py --nnodes 2", None);
        // Torchrun itself refuses what may be two options.
        check("torchrun", "--m 3 train.py", None);
        let module = "python -m torch.distributed.run --max-restarts=2";
        check(module, "train.py", Some(&restarts("2")));
        check("python train.py", "--max-restarts=2", None);
        let value = Some("4".to_owned());
        let env = EnvVar { name: PET_MAX_RESTARTS.into(), value, ..EnvVar::default() };
        let by_variable = Container { env: Some(vec![env]), ..container("torchrun", "train.py") };
        let (problem, _) = refused(&by_variable).unwrap();
        assert_eq!(problem, "has PET_MAX_RESTARTS 4: torchrun would restart ranks by itself");
    }
}
