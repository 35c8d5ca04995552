//! Launches behind copies that are not over, on rows in landings and at home.
//!
//! In: a [`Case`]. Out: the same bits wherever the rows lie, in every layer that a plan is run for; near those of the CPU.

use cadre_kernels::device::{CopyPiece, Gpu, Rooms, Stream};
use cadre_kernels::{Choice, Engine, Threads};
use cadre_step::phases::Direction;
use cadre_worker::launch::{Done, Flight, Resident, Results, Work, launch};
use cadre_worker::memory::{GpuRows, Host, OnGpu, Place};

use super::case::Case;

/// Waits for flights as a thread that computes does; gives results in the order of works.
fn land(flights: Vec<Flight>) -> Vec<Done<GpuRows>> {
    let mut done = Vec::new();
    for flight in flights {
        while !flight.is_over().expect("nothing went wrong") {
            std::thread::yield_now();
        }
        done.extend(flight.land(None).expect("nothing went wrong").0);
    }
    done.sort_by_key(|it| it.work.work);
    done
}

/// The bytes of all results.
fn bytes<P: Place>(place: &P, done: &[Done<P::Memory>]) -> Vec<Vec<u8>> {
    let memories = |it: &Done<P::Memory>| match &it.results {
        Results::Forward(it) => it.to_vec(),
        Results::Backward(it) => it.to_vec(),
    };
    let read = |it: P::Memory| place.read(&it).expect("a copy").bytes().to_vec();
    done.iter().flat_map(memories).map(read).collect()
}

fn run(resident: &mut Resident, place: &OnGpu, works: Vec<Work<GpuRows>>) -> Vec<Vec<u8>> {
    bytes(place, &land(resident.put(works).expect("launches")))
}

/// Results of the GPU are near those of the CPU: O and dQ are bf16, the others f32.
fn compare(gpu: &[Vec<u8>], cpu: &[Vec<u8>], direction: Direction) {
    let outputs = if direction == Direction::Forward { 2 } else { 3 };
    assert_eq!(gpu.len(), cpu.len());
    for (index, (gpu, cpu)) in gpu.iter().zip(cpu).enumerate() {
        let numbers = |bytes: &[u8]| -> Vec<f32> {
            if index % outputs > 0 {
                return bytes
                    .chunks(4)
                    .map(|it| f32::from_le_bytes([it[0], it[1], it[2], it[3]]))
                    .collect();
            }
            let halves = bytes.chunks(2).map(|it| u16::from_le_bytes([it[0], it[1]]));
            halves.map(|it| f32::from_bits(u32::from(it) << 16)).collect()
        };
        let (gpu, cpu) = (numbers(gpu), numbers(cpu));
        assert_eq!(gpu.len(), cpu.len(), "output {index}");
        let square = |it: f32| f64::from(it) * f64::from(it);
        let error: f64 = gpu.iter().zip(&cpu).map(|(a, b)| square(a - b)).sum();
        let size: f64 = cpu.iter().map(|it| square(*it)).sum();
        assert!(
            error.is_finite() && error.sqrt() < 8e-3 * size.sqrt(),
            "output {index}: {error} of {size}"
        );
    }
}

#[test]
#[ignore = "needs a GPU; the other test runs it over the emulated one"]
fn launches() {
    let engine = Engine::choose(Choice::Gpu, Threads::ONE).expect("the driver has a GPU");
    let gpu = Gpu::open(0).expect("the driver has a GPU");
    let place = OnGpu::new(&Rooms::new(&gpu, 1 << 20)).expect("a stream");
    let resident = || Resident::new(&engine, &place).expect("streams");
    let copies = Stream::new(&gpu).expect("a stream");
    let (case, mut long) = (Case::new(), resident());
    for direction in [Direction::Forward, Direction::Backward] {
        let mut plans = Vec::new();
        let mut layers = Vec::new();
        for layer in 0..3 {
            let seed = 17 + layer as u32;
            let rows = Case::rows(&place, seed);
            let landed = case.landed(layer, direction, &rows, (&place, &copies));
            // Lists of the first layer are those of the third, which is of its kind and has its rows elsewhere.
            let landed = run(&mut long, &place, landed);
            let home = run(&mut long, &place, case.home(layer, direction, &rows));
            assert!(landed == home, "{direction:?} of layer {layer}: landed and home differ");
            let alone = case.home(layer, direction, &rows).into_iter();
            let alone = alone.flat_map(|it| run(&mut long, &place, vec![it])).collect::<Vec<_>>();
            assert!(home == alone, "{direction:?} of layer {layer}: works alone differ");
            plans.push(long.made());
            let fresh = run(&mut resident(), &place, case.home(layer, direction, &rows));
            assert!(home == fresh, "{direction:?} of layer {layer}: plans of two residents differ");
            let rows = Case::rows(&Host, seed);
            let works = case.home(layer, direction, &rows);
            let cpu = launch(works, &mut Engine::cpu(Threads::ONE)).expect("sound works");
            compare(&home, &bytes(&Host, &cpu), direction);
            layers.push(home);
        }
        assert!(layers[0] != layers[2], "the layers have different rows");
        assert!(
            plans[0] < plans[1],
            "{direction:?}: a layer of another kind took the first one's plan"
        );
        assert_eq!(plans[1], plans[2], "{direction:?}: the third layer made a plan of its own");
    }
    rooms_of_a_launch_that_is_given_up_stay_its_own(&case, &mut long, &place);
}

fn rooms_of_a_launch_that_is_given_up_stay_its_own(
    case: &Case,
    resident: &mut Resident,
    place: &OnGpu,
) {
    let rows = Case::rows(place, 5);
    let flights = resident.put(case.home(0, Direction::Forward, &rows)).expect("launches");
    drop(flights);
    // Whatever room comes next, nobody else writes to it.
    let rooms = place.rooms();
    let other = Stream::new(rooms.gpu()).expect("a stream");
    let mut taken = Vec::new();
    for _ in 0..8 {
        let mut room = rooms.take(30_000).expect("memory");
        room.write(&other, &vec![7; 30_000]).expect("a copy");
        taken.push(room.share());
    }
    let works = case.home(0, Direction::Forward, &rows);
    assert!(!run(resident, place, works).is_empty());
    for part in taken {
        let mut copy = rooms.take(30_000).expect("memory");
        copy.copy(&other, &part, &[CopyPiece { from: 0, to: 0, bytes: 30_000 }]).expect("inside");
        let mut back = vec![0; 30_000];
        copy.share().read(&other, &mut back).expect("a copy");
        assert!(back.iter().all(|it| *it == 7), "somebody wrote to room of another");
    }
}
