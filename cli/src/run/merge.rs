//! Options of the command line over the arguments in manifests.
//!
//! In: a job or pool, [`RunOptions`]. Out: the job with its trainer's arguments completed, and what they
//! mean, read by the rules of `cadre train` itself. A wrong argument is refused with its container.
//!
//! Only Cadre's own trainer and server are known. What the arguments of another trainer mean is its own affair, so options
//! that `cadre train` would be given are refused with it; how its rows move goes into its environment.

use cadre_crds::contract::{CADRE_EXCHANGE, SERVER_CONTAINER, TRAINER_CONTAINER};
use cadre_crds::k8s_openapi::api::core::v1::{Container as PodContainer, EnvVar, PodTemplateSpec};
use cadre_crds::validate::{self, Refusal};
use cadre_crds::{AttentionPool, TrainingJob};
use cadre_supervisor::launcher;
use cadre_trainer::model::Design;
use clap::{Args, Parser};

use super::exchange::name;
use crate::arguments::{Container, RunOptions, ServeOptions, TrainOptions, one_line};

/// Field that errors about the container's arguments name.
const CONTAINER: &str = "spec.template.spec.containers[0]";

/// Completes the arguments of the trainer's container, and parses them. `None` for another program
/// than `cadre train`.
pub(super) fn trainer(
    job: &mut TrainingJob,
    options: &RunOptions,
) -> Result<Option<TrainOptions>, Refusal> {
    validate::container(&job.spec.template, TRAINER_CONTAINER)?;
    if let Some(seconds) = options.stalled_after_seconds {
        job.spec.failure_policy.stalled_after_seconds = seconds.get();
        validate::patience("--stalled-after-seconds", &job.spec.failure_policy)?;
    }
    if options.profile.is_some() {
        job.spec.attention.profile.clone_from(&options.profile);
    }
    if let Some(tolerance) = options.tolerance {
        job.spec.attention.tolerance = Some(tolerance.to_string());
    }
    let container = only(&mut job.spec.template);
    if let Some(program) = container.command.iter().flatten().next().filter(|it| *it != "cadre") {
        another(program, options)?;
        if let Some(exchange) = options.exchange {
            let env = container.env.get_or_insert_default();
            env.retain(|it| it.name != CADRE_EXCHANGE);
            let value = Some(name(exchange).to_owned());
            env.push(EnvVar { name: CADRE_EXCHANGE.into(), value, value_from: None });
        }
        return match launcher::refused(container) {
            None => Ok(None),
            Some((problem, remedy)) => {
                Err(Refusal { field: format!("{CONTAINER}.args"), problem, remedy: remedy.into() })
            }
        };
    }
    let mut args = own_arguments(container, "train")?;
    if let Some(steps) = options.steps {
        args.push(format!("--steps={steps}"));
    }
    if let Some(seed) = options.seed {
        args.push(format!("--seed={seed}"));
    }
    if let Some(memory) = options.memory_mib {
        args.push(format!("--memory-mib={memory}"));
    }
    if let Some(data) = &options.data {
        let refusal = || Refusal {
            field: "--data".into(),
            problem: format!("{} is not UTF-8", data.display()),
            remedy: "name a directory that is".into(),
        };
        args.push(format!("--data={}", data.to_str().ok_or_else(refusal)?));
    }
    args.extend(exchange(options));
    let parsed: TrainOptions = parse(&args)?;
    Design::from(parsed.model.clone())
        .build()
        .map_err(|error| misunderstood(&error.to_string()))?;
    container.args = Some(args);
    Ok(Some(parsed))
}

/// Refuses options that a trainer other than `cadre train` does not understand.
fn another(program: &str, options: &RunOptions) -> Result<(), Refusal> {
    let RunOptions { steps, seed, data, memory_mib, resume, .. } = options;
    let given = [
        ("--steps", steps.is_some(), "say it in the arguments of its container"),
        ("--seed", seed.is_some(), "say it in the arguments of its container"),
        ("--data", data.is_some(), "say it in the arguments of its container"),
        ("--memory-mib", memory_mib.is_some(), "set spec.attention.inPlaceMemoryMebibytes"),
        ("--resume", *resume, "let it find its own checkpoint"),
    ];
    match given.into_iter().find(|(_, given, _)| *given) {
        None => Ok(()),
        Some((option, _, remedy)) => Err(Refusal {
            field: option.into(),
            problem: format!("is for cadre train, and the job's trainer is {program}"),
            remedy: remedy.into(),
        }),
    }
}

/// Completes the arguments of the server's container, and parses them.
pub(super) fn server(
    pool: &mut AttentionPool,
    options: &RunOptions,
) -> Result<ServeOptions, Refusal> {
    let Some(template) = &mut pool.spec.template else {
        return parse(&exchange(options).into_iter().collect::<Vec<_>>());
    };
    validate::container(template, SERVER_CONTAINER)?;
    let container = only(template);
    let mut args = own_arguments(container, "serve")?;
    args.extend(exchange(options));
    let parsed = parse(&args)?;
    container.args = Some(args);
    Ok(parsed)
}

/// The worker's argument for the run's option `--exchange`.
fn exchange(options: &RunOptions) -> Option<String> {
    options.exchange.map(|it| format!("--exchange={}", name(it)))
}

/// The arguments of a container that runs one of Cadre's own programs; `None` for another program.
pub(crate) fn read<T: Args>(
    template: &PodTemplateSpec,
    subcommand: &str,
) -> Result<Option<T>, Refusal> {
    let mut template = template.clone();
    let containers = template.spec.as_mut().map_or(&mut [][..], |it| &mut it.containers);
    let Some(container) = containers.first_mut() else { return Ok(None) };
    let is_own = container.command.as_ref().is_none_or(|it| {
        it.first().is_some_and(|program| program == "cadre")
            && it.get(1).is_some_and(|it| it == subcommand)
    });
    if !is_own || container.command.is_none() && subcommand == "train" {
        return Ok(None);
    }
    parse(&own_arguments(container, subcommand)?).map(Some)
}

fn only(template: &mut PodTemplateSpec) -> &mut PodContainer {
    let spec = template.spec.as_mut().expect("a template without its container is refused");
    &mut spec.containers[0]
}

/// Arguments behind `cadre train` or `cadre serve`, which may begin in `command`.
fn own_arguments(container: &mut PodContainer, subcommand: &str) -> Result<Vec<String>, Refusal> {
    if container.env.iter().flatten().any(|it| it.name == CADRE_EXCHANGE) {
        return Err(Refusal {
            field: format!("{CONTAINER}.env"),
            problem: format!("sets {CADRE_EXCHANGE}, which is for ranks of other programs"),
            remedy: format!("say --exchange in the arguments of cadre {subcommand}"),
        });
    }
    let args = container.args.clone().unwrap_or_default();
    let command = container.command.clone().unwrap_or_default();
    match command.as_slice() {
        [] if subcommand == "serve" => Ok(args),
        [program, first, rest @ ..] if program == "cadre" && first == subcommand => {
            let all = rest.iter().cloned().chain(args).collect();
            container.command = Some(vec![program.clone(), first.clone()]);
            container.args = Some(Vec::clone(&all));
            Ok(all)
        }
        other => Err(Refusal {
            field: format!("{CONTAINER}.command"),
            problem: format!("is [{}]", other.join(", ")),
            remedy: format!("on one machine write [cadre, {subcommand}]"),
        }),
    }
}

pub(super) fn parse<T: Args>(args: &[String]) -> Result<T, Refusal> {
    let parsed = Container::<T>::try_parse_from(args).map(|it| it.options);
    parsed.map_err(|error| misunderstood(&one_line(&error)))
}

fn misunderstood(why: &str) -> Refusal {
    Refusal {
        field: format!("{CONTAINER}.args"),
        problem: format!("are not understood: {why}"),
        remedy: "correct them".into(),
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use cadre_crds::manifest::{Manifests, Source, parse};

    use super::*;
    use crate::command::{Cli, Command};

    fn manifests(command: &str) -> Manifests {
        let object = |kind: &str, spec: &str| {
            format!("apiVersion: cadre.dev/v1alpha1\nkind: {kind}\nmetadata: {{name: a}}\n{spec}\n")
        };
        let pool = object("AttentionPool", "spec: {}");
        let job = object(
            "TrainingJob",
            &format!(
                "spec: {{attention: {{poolRef: {{name: a}}}}, template: {{spec: {{containers: \
                 [{{name: trainer, {command}}}]}}}}}}"
            ),
        );
        parse(&[Source { file: "m".into(), text: format!("{pool}---\n{job}") }]).unwrap()
    }

    fn options(words: &[&str]) -> RunOptions {
        let words = ["cadre", "run", "-f", "m"].iter().chain(words);
        let command = Cli::try_parse_from(words).unwrap().command;
        let Command::Run(options) = command else { panic!("these are words of a run") };
        *options
    }

    #[test]
    fn options_win_over_the_manifest() {
        let mut job =
            manifests("command: [cadre, train, --steps=9], args: ['--data=a', --seed, '4']").job;
        let merged = trainer(
            &mut job,
            &options(&["--steps=2", "--data", "b", "--stalled-after-seconds=70"]),
        )
        .expect("all is well");
        assert_eq!(job.spec.failure_policy.stalled_after_seconds, 70);
        let merged = merged.expect("it is cadre train");
        assert_eq!((merged.steps.get(), merged.seed), (2, 4));
        assert_eq!(merged.data, PathBuf::from("b"));
        let container = only(&mut job.spec.template);
        assert_eq!(container.command.as_deref().unwrap(), ["cadre", "train"]);
        assert_eq!(
            container.args.as_deref().unwrap(),
            ["--steps=9", "--data=a", "--seed", "4", "--steps=2", "--data=b"]
        );
    }

    #[test]
    fn another_program_keeps_its_arguments_and_takes_no_options() {
        let mut job = manifests("command: [python, train.py], args: [--steps=9]").job;
        assert_eq!(trainer(&mut job, &options(&["--trace=t"])).expect("all is well"), None);
        assert_eq!(only(&mut job.spec.template).args.as_deref().unwrap(), ["--steps=9"]);
        assert_eq!(only(&mut job.spec.template).env, None);
        // The option wins over the manifest.
        for way in ["tcp", "shm"] {
            let option = format!("--exchange={way}");
            assert_eq!(trainer(&mut job, &options(&[&option])).expect("all is well"), None);
            let env = only(&mut job.spec.template).env.as_deref().unwrap();
            assert_eq!((env.len(), env[0].name.as_str()), (1, "CADRE_EXCHANGE"));
            assert_eq!(env[0].value.as_deref(), Some(way));
        }
        for (option, expected) in [
            ("--steps=2", "say it in the arguments of its container"),
            ("--seed=2", "say it in the arguments of its container"),
            ("--data=b", "say it in the arguments of its container"),
            ("--memory-mib=9", "set spec.attention.inPlaceMemoryMebibytes"),
            ("--resume", "let it find its own checkpoint"),
        ] {
            let refusal = trainer(&mut job, &options(&[option])).unwrap_err().to_string();
            let name = option.split('=').next().unwrap();
            let told =
                format!("{name} is for cadre train, and the job's trainer is python; {expected}");
            assert_eq!(refusal, told);
        }
        let mut job = manifests("command: [torchrun, --max-restarts=3], args: [train.py]").job;
        let refusal = trainer(&mut job, &options(&[])).unwrap_err().to_string();
        let told = "spec.template.spec.containers[0].args has --max-restarts 3: torchrun would restart ranks by itself; leave \
                    it out and set spec.failurePolicy.maxRestarts";
        assert_eq!(refusal, told);
    }

    #[test]
    fn a_patience_below_that_with_a_silent_trainer_is_refused_by_its_option() {
        let mut job = manifests("command: [cadre, train], args: ['--data=a', '--steps=1']").job;
        let refusal = trainer(&mut job, &options(&["--stalled-after-seconds=30"])).unwrap_err();
        assert_eq!(
            refusal.to_string(),
            "--stalled-after-seconds is 30, not above spec.failurePolicy.suspectAfterSeconds, which is 30; write more \
             than 30, or lower spec.failurePolicy.suspectAfterSeconds"
        );
    }

    #[test]
    fn wrong_programs_and_arguments_are_refused() {
        for (command, expected) in [
            (
                "command: [cadre, serve]",
                "spec.template.spec.containers[0].command is [cadre, serve]; on one machine \
                 write [cadre, train]",
            ),
            (
                "command: [cadre, train], args: [--data=a, --steps=1, --model=tiny, '--layers=full,full,window:8']",
                "spec.template.spec.containers[0].args are not understood: --layers: the pattern full,full,window:8 has \
                 3 layers, more than the 2 of the model; leave out those beyond, or take a larger model; correct them",
            ),
            (
                "command: [cadre, train], env: [{name: CADRE_EXCHANGE, value: tcp}]",
                "spec.template.spec.containers[0].env sets CADRE_EXCHANGE, which is for ranks of other programs; say \
                 --exchange in the arguments of cadre train",
            ),
            (
                "command: [cadre, train], args: [--stepz=1]",
                "spec.template.spec.containers[0].args are not understood: unexpected argument \
                 '--stepz' found tip: a similar argument exists: '--steps'; correct them",
            ),
        ] {
            let mut job = manifests(command).job;
            let refusal = trainer(&mut job, &options(&[])).unwrap_err();
            assert_eq!(refusal.to_string(), expected);
        }
    }
}
