//! Files of runs that go on, without processes.

use super::*;

/// A directory with so many rows of steps and of headers, of a run that has finished.
fn finished(steps: u64) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let mut output = opened(folder.path(), false);
    for step in 0..steps {
        done(&mut output, step);
    }
    output.finish(&Summary::of(summary::tests::end(), output.steps(), output.servers())).unwrap();
    std::fs::create_dir_all(folder.path().join("checkpoints/step-2")).unwrap();
    folder
}

fn opened(folder: &Path, resume: bool) -> Output {
    Output::open(Directory::choose(Some(folder), "job", resume).unwrap()).unwrap()
}

/// A step comes with its header.
fn done(output: &mut Output, step: u64) {
    let line = format!("{{\"step\":{step}}}");
    output.record(&RunEvent::Header { step, line }).unwrap();
    output.record(&RunEvent::Step(summary::tests::step(step, 2.5))).unwrap();
}

fn attempt(first_step: u64) -> RunEvent {
    RunEvent::Attempt(Attempt { number: 1, first_step, checkpoint: None })
}

#[test]
fn a_run_that_goes_on_is_unfinished_from_its_first_step_until_its_end() {
    let folder = finished(3);
    let ends = || [END, PICTURE].map(|it| folder.path().join(it).is_file());
    assert_eq!(ends(), [true; 2]);
    // One that is refused before its first step changes nothing.
    let mut output = opened(folder.path(), true);
    output.record(&attempt(3)).unwrap();
    assert_eq!(ends(), [true; 2]);
    done(&mut output, 3);
    assert_eq!(ends(), [false; 2]);
    // One that is killed there is resumed, not taken for finished.
    drop(output);
    let error = Directory::choose(Some(folder.path()), "job", false).unwrap_err().to_string();
    assert!(error.contains("holds an unfinished run; add --resume"), "{error}");
    let mut output = opened(folder.path(), true);
    output.record(&attempt(4)).unwrap();
    output.finish(&Summary::of(summary::tests::end(), output.steps(), output.servers())).unwrap();
    assert_eq!(ends(), [true; 2]);
}

#[test]
fn a_run_that_drops_rows_is_unfinished_at_once() {
    let folder = finished(3);
    let mut output = opened(folder.path(), true);
    output.record(&attempt(2)).unwrap();
    assert_eq!(output.steps().len(), 2);
    assert!(!folder.path().join(END).exists() && !folder.path().join(PICTURE).exists());
}

#[test]
fn rows_that_a_crash_took_are_missed_by_name() {
    let folder = finished(4);
    let mut output = opened(folder.path(), true);
    output.record(&attempt(4)).unwrap();
    assert!(output.lost(4).is_empty(), "{:?}", output.lost(4));
    drop(output);
    let steps = folder.path().join("steps.jsonl");
    let text = std::fs::read_to_string(&steps).unwrap();
    let kept: String = text.split_inclusive('\n').take(2).collect();
    std::fs::write(&steps, kept).unwrap();
    let mut output = opened(folder.path(), true);
    output.record(&attempt(4)).unwrap();
    let said = format!("{} lacks 2 rows of steps before 4", steps.display());
    let lost = output.lost(4);
    assert!(lost.len() == 1 && lost[0].starts_with(&said), "{lost:?}");
    // Where the job goes on before them, nothing is lost.
    assert!(output.lost(2).is_empty());
    let (level, text) = (cadre_supervisor::Level::Information, String::new());
    output.record(&RunEvent::Notice { level, text }).unwrap();
}
