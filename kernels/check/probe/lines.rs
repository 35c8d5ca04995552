//! Lines of JSON that tell what happens, whole when they are there.
//!
//! In: values. Out: a file that `bench/gpu/parts.py` reads while it grows. Invariant: what was told before the end of the
//! process is in the file; nothing is buffered. Where the file takes no more, the process ends: nobody would hear the rest, and its
//! silence would be taken for a launch that hangs.

use std::fs::File;
use std::io::Write as _;
use std::path::Path;

use serde_json::{Value, json};

pub(crate) struct Lines(File);

impl Lines {
    pub(crate) fn append(path: &Path) -> Result<Self, String> {
        let file = File::options().append(true).create(true).open(path);
        file.map(Self).map_err(|error| format!("{}: {error}", path.display()))
    }

    pub(crate) fn tell(&mut self, line: &Value) {
        if let Err(why) = self.0.write_all(format!("{line}\n").as_bytes()) {
            println!("the file of lines takes no more: {why}");
            crate::leave(crate::NO_ROOM);
        }
    }

    pub(crate) fn row(&mut self, to: &str, row: &Value) {
        self.tell(&json!({"to": to, "row": row}));
    }
}
