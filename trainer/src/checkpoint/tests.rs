//! Checkpoints on a real file system: written, damaged, foreign, crowded out.

use super::*;
use crate::model::{Config, Pattern, Scores, Stack};

fn layout() -> Parameters {
    Parameters::new(&Config::preset("tiny").unwrap(), &layers("full"))
}

fn layers(pattern: &str) -> Stack {
    let heads = Config::preset("tiny").unwrap().heads();
    pattern.parse::<Pattern>().unwrap().over(2, heads, Scores::default()).unwrap()
}

fn state(step: u64) -> State {
    State {
        step,
        model: Config::preset("tiny").unwrap(),
        layers: layers("full"),
        trainers: 2,
        nano_batches: 2,
        accumulate: 1,
        tokens: 64,
        cap: 64,
        seed: 1,
        corpus: "0123456789abcdef".into(),
        schedule: "constant".into(),
        numerics: "test".into(),
        slots: "2 dedicated".into(),
        loss_bits: "40b17218".into(),
        header: String::new(),
    }
}

fn values() -> Values<Vec<f32>> {
    let parameters = layout().initial(1);
    let first = parameters.iter().map(|it| it * 0.5).collect();
    let second = parameters.iter().map(|it| it * it).collect();
    Values { parameters, first, second }
}

fn write(root: &Path, step: u64) -> Result<PathBuf, CheckpointError> {
    let Values { parameters, first, second } = values();
    let values = Values { parameters: &parameters[..], first: &first, second: &second };
    save(root, (&state(step), None), &layout(), &values, Writer { rank: 0, keep: 3 }, &|| ())
}

#[test]
fn as_many_checkpoints_stay_as_the_job_says() {
    let folder = tempfile::tempdir().unwrap();
    let Values { parameters, first, second } = values();
    let values = Values { parameters: &parameters[..], first: &first, second: &second };
    let check = |step, keep, expected: &[u64]| {
        let writer = Writer { rank: 1, keep };
        save(folder.path(), (&state(step), None), &layout(), &values, writer, &|| ()).unwrap();
        assert_eq!(steps(folder.path()).unwrap(), expected);
    };
    check(1, 5, &[1]);
    check(2, 5, &[1, 2]);
    check(3, 5, &[1, 2, 3]);
    check(4, 5, &[1, 2, 3, 4]);
    check(5, 2, &[4, 5]);
    check(6, 1, &[6]);
    check(7, 0, &[7]);
}

#[test]
fn a_checkpoint_that_was_just_written_stays_whatever_the_folder_held() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    for step in [100, 200, 300] {
        write(root, step).unwrap();
    }
    let Values { parameters, first, second } = values();
    let values = Values { parameters: &parameters[..], first: &first, second: &second };
    for (step, expected) in [(20, [20, 100, 200, 300]), (40, [40, 100, 200, 300])] {
        save(root, (&state(step), None), &layout(), &values, Writer { rank: 0, keep: 1 }, &|| ())
            .unwrap();
        assert_eq!(steps(root).unwrap(), expected);
    }
}

#[test]
fn a_run_from_the_beginning_is_told_of_earlier_checkpoints_and_refuses_foreign_ones() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    assert_eq!(earlier(&root.join("none"), &state(0)).unwrap(), None);
    write(root, 5).unwrap();
    write(root, 6).unwrap();
    assert_eq!(earlier(root, &state(0)).unwrap(), Some(root.join("step-6")));
    let other = State { seed: 2, ..state(0) };
    let refused = earlier(root, &other).unwrap_err().to_string();
    assert!(refused.contains("step-5 has another seed: 1, the job has 2"), "{refused}");
    fs::write(root.join("step-6").join(STATE), "{").unwrap();
    assert!(matches!(earlier(root, &state(0)), Err(CheckpointError::Corrupt { .. })));
    assert_eq!(steps(root).unwrap(), [5, 6]);
}

#[test]
fn what_a_killed_writer_left_goes_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    assert_eq!(sweep(&root.join("none"), 0).unwrap(), 0);
    write(root, 4).unwrap();
    let others = [
        ".step-3-1",
        ".step-3-10",
        ".step--0",
        ".step-3",
        ".step-3-0-0",
        ".step-x-0",
        ".step-03-0",
        ".step-3-00",
        ".old-step-3-1",
        "step-3-0",
        "step-9",
        ".hidden",
    ];
    for name in others.iter().chain(&[".step-3-0", ".step-12-0", ".old-step-1-0"]) {
        fs::create_dir(root.join(name)).unwrap();
        fs::write(root.join(name).join(MODEL), "half").unwrap();
    }
    fs::write(root.join(".step-5-0"), "a file is nobody's draft").unwrap();
    assert_eq!(sweep(root, 0).unwrap(), 3);
    assert_eq!(sweep(root, 0).unwrap(), 0);
    assert!(others.iter().all(|it| root.join(it).join(MODEL).is_file()));
    assert!(root.join(".step-5-0").is_file());
    assert_eq!(load_state(&root.join("step-4")).unwrap(), state(4));
}

#[test]
fn a_checkpoint_tells_of_its_last_step() {
    let folder = tempfile::tempdir().unwrap();
    let Values { parameters, first, second } = values();
    let values = Values { parameters: &parameters[..], first: &first, second: &second };
    let header: cadre_worker::session::Header =
        serde_json::from_str(include_str!("../../../testing/header.json")).unwrap();
    let done = cadre_worker::session::StepDone {
        step: 3,
        loss: 1.0 / 3.0,
        validation_loss: Some(0.7),
        ..Default::default()
    };
    let last = Last { header: header.clone().into(), done: done.clone() };
    let writer = Writer { rank: 0, keep: 3 };
    let of = (&state(4), Some(&last));
    let path = save(folder.path(), of, &layout(), &values, writer, &|| ()).unwrap();
    let found = Last::of(&path).unwrap();
    assert_eq!((&*found.header, found.done), (&header, done));
    fs::write(path.join("last.json"), "{").unwrap();
    assert!(Last::of(&path).is_none());
    load(&path, &state(0), &layout()).unwrap();
    assert!(Last::of(&write(folder.path(), 5).unwrap()).is_none());
}

#[test]
fn a_long_save_says_that_it_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let (path, said) = (folder.path().join("large"), std::cell::Cell::new(0));
    let busy = || {
        // What has been said is there.
        said.set(said.get() + 1);
        let written = fs::metadata(&path).unwrap().len() as usize;
        assert_eq!(written, (said.get() * BUSY_EVERY_BYTES).min(2 * BUSY_EVERY_BYTES + 1));
    };
    write_durable(File::create_new(&path).unwrap(), &vec![1; 2 * BUSY_EVERY_BYTES + 1], &busy)
        .unwrap();
    assert_eq!(said.get(), 3);
}

#[test]
fn what_was_saved_is_loaded_bit_for_bit_and_three_stay() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("checkpoints");
    assert_eq!(newest(&root).unwrap(), None);
    for step in [1, 2, 10, 9, 11] {
        assert_eq!(write(&root, step).unwrap(), root.join(format!("step-{step}")));
    }
    assert_eq!(write(&root, 11).unwrap(), root.join("step-11"));
    let mut names: Vec<_> =
        fs::read_dir(&root).unwrap().map(|it| it.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["step-10", "step-11", "step-9"]);
    let newest = newest(&root).unwrap().unwrap();
    assert_eq!(newest, root.join("step-11"));
    assert_eq!(load(&newest, &state(0), &layout()).unwrap(), (state(11), values()));
    assert_eq!(load_state(&newest).unwrap(), state(11));
}

#[test]
fn only_a_model_of_causal_layers_alone_is_called_a_llama() {
    let folder = tempfile::tempdir().unwrap();
    let Values { parameters, first, second } = values();
    let values = Values { parameters: &parameters[..], first: &first, second: &second };
    let (plain, softcap) = (Scores::default(), "50".parse().ok());
    for (step, pattern, scores, is_llama) in [
        (1, "full", plain, true),
        (2, "full,window:4096", plain, false),
        (3, "full", Scores { softcap, ..plain }, false),
        (4, "full,full dim 64", plain, false),
    ] {
        let state = state(step);
        let layers = pattern.parse::<Pattern>().unwrap();
        let layers = layers.over(2, state.model.heads(), scores).unwrap();
        let state = State { layers, ..state };
        let writer = Writer { rank: 0, keep: 3 };
        let path = save(folder.path(), (&state, None), &layout(), &values, writer, &|| ()).unwrap();
        assert_eq!(path.join(CONFIG).is_file(), is_llama, "{pattern}");
    }
    let state = state(5);
    let uneven = State { model: Config { query_heads: 6, ..state.model }, ..state.clone() };
    let expected =
        "its width 64 is no multiple of its 6 query heads, as transformers asks of a Llama";
    assert_eq!(uneven.beyond_llama().as_deref(), Some(expected));
    assert_eq!(state.beyond_llama(), None);
}

/// Names and shapes of `LlamaForCausalLM.state_dict()` in transformers 5, for the sizes of `tiny`.
#[test]
fn tensors_have_the_names_and_shapes_of_a_llama_of_transformers() {
    let folder = tempfile::tempdir().unwrap();
    let path = write(folder.path(), 4).unwrap();
    let bytes = fs::read(path.join(MODEL)).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut expected = vec![
        ("model.embed_tokens.weight".to_owned(), vec![256, 64]),
        ("model.norm.weight".to_owned(), vec![64]),
        ("lm_head.weight".to_owned(), vec![256, 64]),
    ];
    for layer in 0..2 {
        for (name, shape) in [
            ("input_layernorm", &[64][..]),
            ("self_attn.q_proj", &[64, 64]),
            ("self_attn.k_proj", &[32, 64]),
            ("self_attn.v_proj", &[32, 64]),
            ("self_attn.o_proj", &[64, 64]),
            ("post_attention_layernorm", &[64]),
            ("mlp.gate_proj", &[176, 64]),
            ("mlp.up_proj", &[176, 64]),
            ("mlp.down_proj", &[64, 176]),
        ] {
            expected.push((format!("model.layers.{layer}.{name}.weight"), shape.to_vec()));
        }
    }
    let tensors = file.tensors();
    let mut found: Vec<_> =
        tensors.iter().map(|(name, it)| (name.clone(), it.shape().to_vec())).collect();
    expected.sort();
    found.sort();
    assert_eq!(found, expected);
    let config: serde_json::Value =
        serde_json::from_slice(&fs::read(path.join(CONFIG)).unwrap()).unwrap();
    assert_eq!(config["architectures"][0], "LlamaForCausalLM");
    for (name, value) in [
        ("vocab_size", 256),
        ("hidden_size", 64),
        ("intermediate_size", 176),
        ("num_hidden_layers", 2),
        ("num_attention_heads", 2),
        ("num_key_value_heads", 1),
        ("head_dim", 32),
        ("max_position_embeddings", 64),
    ] {
        assert_eq!(config[name], value, "{name}");
    }
}

#[test]
fn damaged_checkpoints_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let check = |file: &str, damage: &dyn Fn(&mut Vec<u8>), expected: &str| {
        remove(&folder.path().join("step-4")).unwrap();
        let path = write(folder.path(), 4).unwrap();
        let mut bytes = fs::read(path.join(file)).unwrap();
        damage(&mut bytes);
        fs::write(path.join(file), bytes).unwrap();
        let error = load(&path, &state(0), &layout()).unwrap_err().to_string();
        let place = path.join(file).display().to_string();
        assert!(error.contains(&place) && error.contains(expected), "{error}");
    };
    check(MODEL, &|bytes| bytes[9000] ^= 1, "its digest is another");
    check(OPTIMIZER, &|bytes| bytes.truncate(100), "its digest is another");
    check(STATE, &|bytes| bytes.truncate(20), "is damaged");
    let other_step = |bytes: &mut Vec<u8>| {
        let text = String::from_utf8(bytes.clone()).unwrap();
        *bytes = text.replace("\"step\": 4", "\"step\": 5").into_bytes();
    };
    check(STATE, &other_step, "its digest is another");
    let other_format = |bytes: &mut Vec<u8>| {
        let text = String::from_utf8(bytes.clone()).unwrap();
        // As it was before layers had kinds.
        let older =
            text.replace("\"format\": 6", "\"format\": 2").replace("\"layers\"", "\"none\"");
        *bytes = older.into_bytes();
    };
    check(STATE, &other_format, "has format 2, this build knows 6");
    fs::remove_file(folder.path().join("step-4").join(MODEL)).unwrap();
    write(folder.path(), 5).unwrap();
    fs::remove_file(folder.path().join("step-5").join(STATE)).unwrap();
    let error = load(&folder.path().join("step-5"), &state(0), &layout()).unwrap_err();
    assert!(error.to_string().starts_with("cannot read checkpoint"), "{error}");
}

#[test]
fn checkpoints_of_another_run_are_refused_by_field() {
    let folder = tempfile::tempdir().unwrap();
    let path = write(folder.path(), 4).unwrap();
    let check = |change: &dyn Fn(&mut State), expected: Option<&str>| {
        let mut wanted = state(0);
        change(&mut wanted);
        let error = load(&path, &wanted, &layout()).err().map(|it| it.to_string());
        assert_eq!(error.is_some(), expected.is_some(), "{error:?}");
        if let (Some(error), Some(expected)) = (error, expected) {
            assert!(error.contains(expected), "{error}");
        }
    };
    check(&|it| it.trainers = 3, Some("another number of trainers: 2, the job has 3"));
    check(&|it| it.model.layers = 3, Some("another model"));
    check(&|it| it.layers = layers("full,full"), None);
    let expected = "another list of layers: 2 × causal heads 2/1 dim 32, the job has \
                    1 × window:64 heads 2/1 dim 32, 1 × causal heads 2/1 dim 32";
    check(&|it| it.layers = layers("window:64,full"), Some(expected));
    check(&|it| it.seed = 2, Some("another seed"));
    check(&|it| it.corpus = "0".into(), Some("another corpus"));
    check(&|it| it.slots = "1 dedicated".into(), None);
    check(&|it| it.numerics = "other".into(), None);
}

#[test]
fn a_full_disk_leaves_nothing_half_written() {
    let full = File::options().write(true).open("/dev/full").unwrap();
    let error = write_durable(full, b"x", &|| ()).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::StorageFull);

    // A file where the target has to be: the rename fails after everything was written.
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("step-4"), "mine").unwrap();
    let error = write(folder.path(), 4).unwrap_err().to_string();
    assert!(error.starts_with("cannot write checkpoint"), "{error}");
    let names: Vec<_> =
        fs::read_dir(folder.path()).unwrap().map(|it| it.unwrap().file_name()).collect();
    assert_eq!(names, ["step-4"]);
}
