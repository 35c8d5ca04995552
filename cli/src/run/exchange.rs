//! What the options of trainers and servers about their exchange and their GPU must have in common.
//!
//! In: a job, and what its trainers and servers say. Out: a refusal with field and remedy, or nothing. Only Cadre's own trainer and
//! server are known.

use cadre_crds::contract::CADRE_EXCHANGE;
use cadre_crds::validate::Refusal;
use cadre_crds::{Encryption, TrainingJob, Wire};
use cadre_kernels::is_gpu_head_dim;
use cadre_trainer::model::Design;
use clap::ValueEnum;

use crate::arguments::{ServeOptions, TrainOptions};
use crate::choices::{EngineChoice, ExchangeChoice};

/// Name of the choice in the option `--exchange`.
pub(crate) fn name(choice: ExchangeChoice) -> &'static str {
    match choice {
        ExchangeChoice::Auto => "auto",
        ExchangeChoice::Tcp => "tcp",
        ExchangeChoice::Shm => "shm",
        ExchangeChoice::Ucx => "ucx",
        ExchangeChoice::Node => "node",
    }
}

/// Whether one job may have workers with both choices. A worker that says `auto` takes the path
/// that the other one names.
fn go_together(one: ExchangeChoice, other: ExchangeChoice) -> bool {
    use ExchangeChoice::{Auto, Shm, Tcp, Ucx};
    one == other || matches!((one, other), (Auto, Tcp | Shm | Ucx) | (Tcp | Shm | Ucx, Auto))
}

/// Refuses an exchange that the workers, or the rows of the job, are not for.
pub(crate) fn check_exchange(
    job: &TrainingJob,
    trainer: Option<&TrainOptions>,
    server: Option<&ServeOptions>,
) -> Result<(), Refusal> {
    let refuse = |field: &str, problem: &str, remedy: &str| {
        Err(Refusal { field: field.into(), problem: problem.into(), remedy: remedy.into() })
    };
    let of_trainers = match trainer {
        Some(trainer) => trainer.process.exchange,
        None => of_another(job)?,
    };
    let of_servers = server.map(|it| it.process.exchange);
    let chosen = [Some(of_trainers), of_servers];
    if chosen.contains(&Some(ExchangeChoice::Ucx))
        && job.spec.attention.encryption == Some(Encryption::Required)
    {
        let problem =
            "is ucx, which sends rows in the clear, and spec.attention.encryption is Required";
        return refuse("--exchange", problem, "say encryption: Tcp there, or --exchange=auto");
    }
    if trainer.is_none() && chosen.contains(&Some(ExchangeChoice::Node)) {
        let problem =
            "is node, and a trainer other than cadre train has its rows where the host reads them";
        return refuse("--exchange", problem, "say auto for trainers and servers");
    }
    if let Some(of_servers) = of_servers.filter(|it| !go_together(*it, of_trainers)) {
        let (of_trainers, of_servers) = (name(of_trainers), name(of_servers));
        let problem = format!("is {of_trainers} for trainers, {of_servers} for servers");
        return refuse("--exchange", &problem, "say the same in both, or to `cadre run`");
    }
    let Some(trainer) = trainer else { return Ok(()) };
    if of_trainers != ExchangeChoice::Node {
        return Ok(());
    }
    let engines = [Some(trainer.engine), server.map(|it| it.engine)];
    if engines.into_iter().flatten().any(|it| it != EngineChoice::Gpu) {
        let problem =
            "is node, which moves rows that lie on a GPU, and not all workers say --engine gpu";
        return refuse(
            "--exchange",
            problem,
            "say --engine=gpu in their arguments, or --exchange tcp",
        );
    }
    if job.spec.attention.wire != Some(Wire::Bf16) {
        let problem =
            "is not Bf16, and --exchange node leaves rows where only GPU kernels read them";
        return refuse("spec.attention.wire", problem, "say wire: Bf16, or --exchange tcp");
    }
    let of_servers = server.map(|it| it.process.gpu.unwrap_or(0));
    let of_trainers = trainer.process.gpu.unwrap_or(0);
    if let Some(of_servers) = of_servers.filter(|it| *it != of_trainers) {
        let problem = format!(
            "is {of_trainers} for trainers, {of_servers} for servers, and --exchange node needs them on one GPU"
        );
        return refuse("--gpu", &problem, "say the same in both, or --exchange tcp");
    }
    let design = Design::from(trainer.model.clone());
    // Others refuse a model that is none.
    let Ok((_, stack)) = design.build() else { return Ok(()) };
    let core = stack.core();
    let mut dims = (0..core.count()).map(|it| (usize::from(it), core.kind_of(it.into()).heads.dim));
    if let Some((core, dim)) = dims.find(|it| !is_gpu_head_dim(it.1.into())) {
        let (model, layer) = (&design.preset, stack.layer_of(core));
        let problem = format!(
            "is {model}, whose layer {layer} has head dim {dim}, which --exchange node does not take"
        );
        let remedy = "give all layers head dims of 64, 128 or 256 (--head-dim, --layers), or say --exchange tcp";
        return refuse("--model", &problem, remedy);
    }
    Ok(())
}

/// What the environment of a trainer says that is another program than `cadre train`.
pub(crate) fn of_another(job: &TrainingJob) -> Result<ExchangeChoice, Refusal> {
    let containers = job.spec.template.spec.iter().flat_map(|it| &it.containers);
    let mut variables = containers.take(1).flat_map(|it| it.env.iter().flatten());
    let told = variables.find(|it| it.name == CADRE_EXCHANGE).and_then(|it| it.value.as_deref());
    let Some(told) = told else { return Ok(ExchangeChoice::Auto) };
    ExchangeChoice::from_str(told, false).map_err(|_| Refusal {
        field: CADRE_EXCHANGE.into(),
        problem: format!("is {told}"),
        remedy: "write auto, tcp, shm or ucx".into(),
    })
}

#[cfg(test)]
mod tests {
    use cadre_crds::k8s_openapi::api::core::v1::EnvVar;
    use cadre_crds::manifest::{Source, parse};

    use super::super::merge;
    use super::*;

    /// A job whose trainers are other programs.
    fn job() -> TrainingJob {
        let text = "apiVersion: cadre.dev/v1alpha1\nkind: AttentionPool\nmetadata: {name: a}\nspec: {}\n---\n\
                    apiVersion: cadre.dev/v1alpha1\nkind: TrainingJob\nmetadata: {name: a}\nspec: {attention: {poolRef: \
                    {name: a}, wire: Bf16}, template: {spec: {containers: [{name: trainer, command: [a]}]}}}\n";
        parse(&[Source { file: "m".into(), text: text.into() }]).unwrap().job
    }

    fn server(words: &str) -> ServeOptions {
        merge::parse(&words.split(' ').map(str::to_owned).collect::<Vec<_>>()).unwrap()
    }

    fn trainer(words: &[&str]) -> TrainOptions {
        let words =
            ["--data=a", "--steps=1", "--engine=gpu", "--exchange=node"].iter().chain(words);
        merge::parse(&words.map(|it| (*it).to_owned()).collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn servers_of_another_trainer_take_no_rows_of_a_gpu_and_none_in_the_clear_if_required() {
        let mut job = job();
        check_exchange(&job, None, Some(&server("--exchange=node"))).unwrap_err();
        let ucx = server("--exchange=ucx");
        assert!(check_exchange(&job, None, Some(&ucx)).is_ok());
        for allows in [Encryption::Tcp, Encryption::Off] {
            job.spec.attention.encryption = Some(allows);
            assert!(check_exchange(&job, None, Some(&ucx)).is_ok(), "{allows:?}");
        }
        job.spec.attention.encryption = Some(Encryption::Required);
        assert_eq!(
            check_exchange(&job, None, Some(&ucx)).unwrap_err().to_string(),
            "--exchange is ucx, which sends rows in the clear, and spec.attention.encryption is Required; say encryption: Tcp \
             there, or --exchange=auto"
        );
    }

    #[test]
    fn a_trainer_of_another_program_says_its_exchange_in_its_environment() {
        let with = |way: &str| {
            let mut job = job();
            let container = &mut job.spec.template.spec.as_mut().unwrap().containers[0];
            let (name, value) = (CADRE_EXCHANGE.into(), Some(way.into()));
            container.env = Some(vec![EnvVar { name, value, value_from: None }]);
            job
        };
        for (trainers, servers, refusal) in [
            ("tcp", "tcp", ""),
            ("tcp", "auto", ""),
            ("auto", "shm", ""),
            ("tcp", "shm", "--exchange is tcp for trainers, shm for servers; say the same"),
            ("node", "auto", "--exchange is node, and a trainer other than cadre train has"),
            ("rdma", "auto", "CADRE_EXCHANGE is rdma; write auto, tcp, shm or ucx"),
        ] {
            let server = server(&format!("--exchange={servers}"));
            let found = check_exchange(&with(trainers), None, Some(&server));
            let said = found.err().map(|it| it.to_string()).unwrap_or_default();
            assert!(said.starts_with(refusal) && said.is_empty() == refusal.is_empty(), "{said}");
        }
    }

    #[test]
    fn rows_stay_on_a_gpu_only_where_every_layer_has_a_kernel() {
        let check = |words: &[&str]| check_exchange(&job(), Some(&trainer(words)), None);
        // The heads of the layers count, not those of the preset.
        for words in [
            &["--model=small"][..],
            &["--model=tiny", "--layers=full dim 64,window:8 dim 128"],
            &["--model=tiny", "--layers=none,full dim 64"],
        ] {
            assert!(check(words).is_ok(), "{words:?}: {:?}", check(words));
        }
        for (words, layer) in [
            (&["--model=tiny"][..], "layer 0 has head dim 32"),
            (&["--model=small", "--layers=full dim 64,full dim 80"], "layer 1 has head dim 80"),
            (
                &["--model=small", "--layers=none,full dim 64,full dim 80"],
                "layer 2 has head dim 80",
            ),
        ] {
            let refusal = check(words).unwrap_err().to_string();
            assert!(refusal.starts_with("--model is ") && refusal.contains(layer), "{refusal}");
            assert!(refusal.contains("or say --exchange tcp"), "{refusal}");
        }
    }

    #[test]
    fn rows_stay_on_one_gpu_alone() {
        let served = |words| server(&format!("--engine=gpu --exchange=node{words}"));
        let check = |words: &[&str], served: &ServeOptions| {
            check_exchange(&job(), Some(&trainer(words)), Some(served))
        };
        let model = "--model=small";
        assert!(check(&[model], &served("")).is_ok());
        assert!(check(&[model, "--gpu=1"], &served(" --gpu=1")).is_ok());
        let refusal = check(&[model, "--gpu=1"], &served("")).unwrap_err().to_string();
        let told = "--gpu is 1 for trainers, 0 for servers, and --exchange node needs them on one GPU; say the same in both, \
                    or --exchange tcp";
        assert_eq!(refusal, told);
    }
}
