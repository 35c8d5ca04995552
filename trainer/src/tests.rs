//! Whole steps of the `tiny` model on real text, with attention in this process.

use std::net::{IpAddr, Ipv4Addr};
use std::num::{NonZeroU16, NonZeroU32};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use cadre_kernels::Threads;
use cadre_worker::session::{
    Direction, PhaseAt, PhaseOrder, Sinks, Turns,
    links::{Greeter, PeerId, Purpose, Waker},
};

use super::checkpoint::{self, State, Values, Writer};
use super::corpus::{Corpus, Document};
use super::loader::{Lengths, Loader, Rows, Settings, Stream};
use super::model::{Activations, Config, Model, Pattern, Scores};
use super::optimizer::{AdamW, Hyper, Schedule};
use super::ring::{Members, Ring};
use super::sample::sample;
use super::step::{StepError, StepResult, Trainer, through};
use super::{At, Attention, AttentionError, Gradients, IN_FLIGHT, InProcess};

const STEPS: u64 = 30;

fn corpus() -> Arc<Corpus> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/bible/01-Genesis.txt");
    let bytes = std::fs::read(path).unwrap();
    Arc::new(Corpus::from_documents(vec![Document::text("01-Genesis.txt", bytes)]))
}

pub(crate) fn loader(nano_batches: u32) -> Loader {
    let some = |it| NonZeroU32::new(it).unwrap();
    let settings = Settings {
        trainers: some(1),
        tokens: some(384),
        nano_batches: some(nano_batches),
        cap: some(256),
        seed: 3,
    };
    Loader::new(corpus(), Lengths::shipped(), settings).unwrap()
}

fn hyper() -> Hyper {
    Hyper::new(Schedule { peak: 5e-3, warmup: 4, steps: STEPS })
}

/// One layer with a window shorter than documents, one without.
fn model() -> Model {
    let config = Config::preset("tiny").unwrap();
    let layers = "window:40,full".parse::<Pattern>().unwrap();
    let layers = layers.over(2, config.heads(), Scores::default()).unwrap();
    Model::new(config, layers, 256, Threads::ONE)
}

pub(crate) fn in_process(model: &Model) -> InProcess {
    InProcess::new(model.stack().core().clone(), Threads::ONE)
}

pub(crate) fn trainer() -> Trainer {
    let model = model();
    let parameters = model.parameters().initial(3);
    let optimizer = AdamW::new(hyper(), model.parameters());
    Trainer::new(model, parameters, optimizer)
}

/// `times` times the next `nanos` nano-batches forward and backward.
pub(crate) fn accumulated(trainer: &Trainer, times: u16, nanos: u16) -> PhaseOrder {
    let number = |it| NonZeroU16::new(it).unwrap();
    let turns = Turns::accumulated(number(times), number(nanos)).unwrap();
    let layers = trainer.model().stack().core().count();
    PhaseOrder::new(&turns, layers, (times * nanos).into()).unwrap()
}

pub(crate) fn batch(loader: &Loader, step: u64) -> (Vec<Rows>, u64, Vec<Vec<u32>>) {
    let nano_batches = loader.settings().nano_batches.get();
    let streams: Vec<Stream> = (0..nano_batches).map(|nano| loader.stream(step, nano)).collect();
    let rows = streams.iter().map(|it| it.rows(0)).collect();
    let documents = streams.iter().map(|it| it.documents().to_vec()).collect();
    (rows, streams.iter().map(Stream::count).sum(), documents)
}

/// Steps of a lone trainer.
fn run(trainer: &mut Trainer, loader: &Loader, steps: std::ops::Range<u64>) -> Vec<StepResult> {
    let mut attention = in_process(trainer.model());
    let order = accumulated(trainer, 1, loader.settings().nano_batches.get() as u16);
    let step = |step| {
        let (rows, targets, documents) = batch(loader, step);
        attention.begin(documents);
        trainer
            .step((step, &order), rows, targets, &mut attention, &mut Ring::alone(), &mut ())
            .unwrap()
    };
    steps.map(step).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|it| it.to_bits()).collect()
}

#[test]
fn the_loss_falls_on_real_text_and_the_run_repeats_bit_for_bit() {
    let loader = loader(2);
    let mut first = trainer();
    let results = run(&mut first, &loader, 0..STEPS);
    let (begin, end) = (results[0].loss, results[STEPS as usize - 1].loss);
    assert!((begin - 5.7).abs() < 0.8 && end < begin - 2.0, "{begin} {end}");
    let entropy = loader.corpus().unigram_entropy();
    assert!((2.7..3.1).contains(&entropy), "{entropy}");

    let mut second = trainer();
    let again = run(&mut second, &loader, 0..STEPS);
    let losses = |results: &[StepResult]| results.iter().map(|it| it.loss.to_bits()).collect();
    let (one, two): (Vec<u32>, Vec<u32>) = (losses(&results), losses(&again));
    assert_eq!(one, two);
    assert_eq!(bits(first.parameters()), bits(second.parameters()));

    let (mut model, parameters) = (model(), first.parameters().to_vec());
    let prompt = b"And ".map(u32::from);
    let mut text = |heat, seed| sample(&mut model, &parameters, &prompt, 40, heat, seed).unwrap();
    let greedy = text(0.0, 1);
    assert_eq!(greedy.len(), 40);
    assert_eq!(greedy, text(0.0, 2));
    assert_eq!(text(1.0, 1), text(1.0, 1));
    assert_ne!(text(1.0, 1), text(1.0, 2));
}

#[test]
fn a_resumed_run_goes_on_with_the_same_bits() {
    let loader = loader(1);
    let mut whole = trainer();
    run(&mut whole, &loader, 0..4);

    let mut half = trainer();
    let done = run(&mut half, &loader, 0..2);
    let folder = tempfile::tempdir().unwrap();
    let (first, second) = half.optimizer().moments();
    let values = Values { parameters: half.parameters(), first, second };
    let state = State {
        step: 2,
        model: *half.model().config(),
        layers: half.model().stack().clone(),
        trainers: 1,
        nano_batches: 1,
        accumulate: 1,
        tokens: 384,
        cap: 256,
        seed: 3,
        corpus: format!("{:016x}", loader.corpus().digest()),
        schedule: String::new(),
        numerics: cadre_kernels::numerics_id(),
        slots: String::new(),
        loss_bits: format!("{:08x}", done[1].loss.to_bits()),
        header: String::new(),
    };
    let layout = half.model().parameters().clone();
    let path = checkpoint::save(
        folder.path(),
        (&state, None),
        &layout,
        &values,
        Writer { rank: 0, keep: 1 },
        &|| (),
    )
    .unwrap();

    let (state, values) = checkpoint::load(&path, &state, &layout).unwrap();
    let optimizer = AdamW::resume(hyper(), values.first, values.second);
    let mut resumed = Trainer::new(model(), values.parameters, optimizer);
    run(&mut resumed, &loader, state.step..4);
    assert_eq!(bits(resumed.parameters()), bits(whole.parameters()));
    assert_eq!(resumed.optimizer(), whole.optimizer());
}

/// What two trainers do at once, each with its end of their ring.
pub(crate) fn in_pairs<T: Send>(run: impl Fn(usize, Ring) -> T + Sync) -> [T; 2] {
    let listeners = [0, 1].map(|_| Greeter::listen(IpAddr::V4(Ipv4Addr::LOCALHOST)).unwrap());
    let place =
        |rank: usize| (PeerId::trainer(rank as u16, 0), listeners[rank].local_addr().unwrap());
    let trainers = [place(0), place(1)];
    let one = |rank: usize| {
        let greeter = &Greeter::new(Purpose::Ring, trainers[rank].0, [1; 32], 1);
        let (listener, interrupt) = (&listeners[rank], &Waker::new().unwrap());
        let members = Members { greeter, listener, trainers: &trainers, job: 7, interrupt };
        let limit = Duration::from_mins(1);
        run(rank, Ring::connect(&members, limit, limit).unwrap())
    };
    std::thread::scope(|scope| {
        let threads = [0, 1].map(|rank| {
            scope.spawn({
                let one = &one;
                move || one(rank)
            })
        });
        threads.map(|it| it.join().unwrap())
    })
}

#[test]
fn two_trainers_learn_what_one_with_all_their_rows_learns() {
    let loader = loader(2);
    let mut alone = trainer();
    let expected = run(&mut alone, &loader, 0..3);

    let results = in_pairs(|rank, mut ring| {
        let mut trainer = trainer();
        let mut attention = in_process(trainer.model());
        let mut losses = Vec::new();
        for step in 0..3 {
            let (mut rows, targets, mut documents) = batch(&loader, step);
            attention.begin(vec![documents.swap_remove(rank)]);
            let rows = vec![rows.swap_remove(rank)];
            let order = accumulated(&trainer, 1, 1);
            let at = (step, &order);
            let result = trainer.step(at, rows, targets, &mut attention, &mut ring, &mut ());
            losses.push(result.unwrap().loss);
        }
        (losses, trainer.parameters().to_vec())
    });
    assert_eq!(bits(&results[0].0), bits(&results[1].0));
    assert_eq!(bits(&results[0].1), bits(&results[1].1));
    for (loss, expected) in results[0].0.iter().zip(&expected) {
        assert!((loss - expected.loss).abs() < 1e-4, "{loss} {}", expected.loss);
    }
}

/// Checks the order of phases, and may poison a result.
struct Checked {
    inner: InProcess,
    phases: Vec<PhaseAt>,
    submitted: usize,
    waited: usize,
    poison: Option<usize>,
}

impl Checked {
    fn check(&mut self, submit: bool, back: bool, At { layer, nano }: At) {
        let direction = if back { Direction::Backward } else { Direction::Forward };
        let phase = PhaseAt { layer, nano, direction };
        if submit {
            assert_eq!(phase, self.phases[self.submitted]);
            self.submitted += 1;
            assert!(self.submitted - self.waited <= IN_FLIGHT);
        } else {
            assert_eq!(phase, self.phases[self.waited]);
            self.waited += 1;
        }
    }
}

impl Attention for Checked {
    fn submit_forward(&mut self, at: At, qkv: [Vec<f32>; 3]) -> Result<(), AttentionError> {
        self.check(true, false, at);
        self.inner.submit_forward(at, qkv)
    }

    fn wait_forward(&mut self, at: At, sinks: &[f32]) -> Result<Vec<f32>, AttentionError> {
        self.check(false, false, at);
        let mut out = self.inner.wait_forward(at, sinks)?;
        if self.poison == Some(at.layer) {
            out[7] = f32::NAN;
        }
        Ok(out)
    }

    fn submit_backward(&mut self, at: At, rows: [Vec<f32>; 2]) -> Result<(), AttentionError> {
        self.check(true, true, at);
        self.inner.submit_backward(at, rows)
    }

    fn wait_backward(&mut self, at: At) -> Result<Gradients, AttentionError> {
        self.check(false, true, at);
        self.inner.wait_backward(at)
    }
}

fn checked(
    (times, nano_batches): (u16, u16),
    poison: Option<usize>,
) -> (Result<StepResult, StepError>, Checked) {
    let (loader, mut trainer) = (loader((times * nano_batches).into()), trainer());
    let order = accumulated(&trainer, times, nano_batches);
    let (rows, targets, documents) = batch(&loader, 5);
    let mut attention = Checked {
        inner: in_process(trainer.model()),
        phases: order.iter().collect(),
        submitted: 0,
        waited: 0,
        poison,
    };
    attention.inner.begin(documents);
    let ring = &mut Ring::alone();
    (trainer.step((5, &order), rows, targets, &mut attention, ring, &mut ()), attention)
}

#[test]
fn phases_come_in_order_with_at_most_two_in_flight() {
    for (times, nano_batches) in [(1, 1), (1, 2), (1, 3), (2, 1), (2, 3), (3, 2)] {
        let (result, attention) = checked((times, nano_batches), None);
        assert!(result.unwrap().loss.is_finite());
        assert_eq!(attention.waited, 4 * usize::from(times * nano_batches));
        assert_eq!(attention.waited, attention.submitted);
    }
}

#[test]
fn a_loss_that_is_not_finite_stops_the_step_and_names_it() {
    let (result, _) = checked((1, 2), Some(0));
    let error = result.unwrap_err().to_string();
    assert!(error.starts_with("the loss of step 5 is NaN"), "{error}");
}

/// What follows `prompt`, with every row's attention computed anew by the kernels.
fn continued(model: &mut Model, parameters: &[f32], prompt: &[u32], length: usize) -> Vec<u32> {
    let mut text = prompt.to_vec();
    for _ in 0..length {
        let count = text.len() as u32;
        let (positions, targets) = ((0..count).collect(), vec![None; text.len()]);
        let mut kept = Activations::default();
        model.embed(parameters, Rows { ids: text.clone(), positions, targets }, &mut kept);
        let mut attention = in_process(model);
        attention.begin(vec![vec![count]]);
        through(model, parameters, &mut kept, &mut attention).unwrap();
        let logits = model.last_logits(parameters, &kept).unwrap();
        let likeliest = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]));
        text.push(likeliest.unwrap() as u32);
    }
    text.split_off(prompt.len())
}

#[test]
fn a_sample_is_of_the_layers_that_were_trained() {
    let (scale, softcap) = ("0.9".parse().ok(), "3".parse().ok());
    let plain = Scores::default();
    let mut texts = Vec::new();
    for (pattern, scores) in [
        ("full", plain),
        ("window:2", plain),
        ("chunk:5,full", plain),
        ("none,full", plain),
        ("full", Scores { scale, ..plain }),
        ("full", Scores { scale, softcap, ..plain }),
        ("window:9,chunk:6", Scores { sinks: Sinks::Learnt, ..plain }),
        ("window:9 heads 4/4 dim 16,full dim 72", plain),
    ] {
        let config = Config { vocabulary: 300, ..Config::preset("tiny").unwrap() };
        let stack = pattern.parse::<Pattern>().unwrap().over(2, config.heads(), scores).unwrap();
        let mut model = Model::new(config, stack, 256, Threads::ONE);
        let mut parameters = model.parameters().initial(3);
        for tensor in model.parameters().tensors() {
            // So that attention has much to say.
            let by = if tensor.name.contains("self_attn") { 4.0 } else { 1.0 };
            let values = &mut parameters[tensor.range.clone()];
            for it in &mut *values {
                *it *= by;
            }
            if tensor.name.ends_with("sinks") {
                values.fill(2.5);
            }
        }
        let prompt = [65, 299, 100, 32, 256, 104, 101];
        let text = sample(&mut model, &parameters, &prompt, 24, 0.0, 1).unwrap();
        assert_eq!(text, continued(&mut model, &parameters, &prompt, 24), "{pattern}");
        assert!(!texts.contains(&text), "{pattern}: as one before");
        texts.push(text);
    }
}
