//! Children of tests: this program with one ignored test, that does one thing after another as it is told, and says what came of it.
//!
//! In: words of the parent, a line each. Out: lines that begin with `child: `. A child ends with its owner.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdout, Command, Stdio};

use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

/// A child that does one thing after another as it is told, and is killed with its owner.
pub(crate) struct Told {
    pub(crate) child: Child,
    said: BufReader<ChildStdout>,
}

impl Told {
    /// Starts the ignored test of this path.
    pub(crate) fn start(name: &str) -> Self {
        Self::start_by(&[], name)
    }

    /// The same, by a program with its first arguments.
    pub(crate) fn start_by(words: &[&str], name: &str) -> Self {
        let program = std::env::current_exe().expect("this program");
        let program = program.to_str().expect("our own path");
        let all = [words, &[program, name, "--exact", "--ignored", "--nocapture"]].concat();
        let mut child = Command::new(all[0])
            .args(&all[1..])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("it is executable");
        let said = BufReader::new(child.stdout.take().expect("piped"));
        Self { child, said }
    }

    pub(crate) fn tell(&mut self, word: &str) {
        let to = self.child.stdin.as_mut().expect("piped");
        writeln!(to, "{word}").expect("it reads");
    }

    /// The next thing that it says.
    pub(crate) fn hear(&mut self) -> String {
        loop {
            let mut line = String::new();
            let read = self.said.read_line(&mut line).expect("text");
            assert!(read > 0, "the child is gone");
            // The harness writes the test's name in front of the first one.
            if let Some((_, said)) = line.split_once("child: ") {
                return said.trim_end().to_owned();
            }
        }
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Stops it, and returns when it stands.
    pub(crate) fn stop(&self) {
        kill_process(self.pid(), Signal::STOP).expect("our own child");
        let (_, status) = waitpid(Some(self.pid()), WaitOptions::UNTRACED)
            .expect("our own child")
            .expect("it waits");
        assert!(status.stopped(), "{status:?}");
    }

    pub(crate) fn go_on(&self) {
        kill_process(self.pid(), Signal::CONT).expect("our own child");
    }
}

impl Drop for Told {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) fn say(what: &str) {
    println!("child: {what}");
}

/// Words of the parent, while nobody polls.
pub(crate) fn word() -> String {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).expect("text");
    line.trim().to_owned()
}
