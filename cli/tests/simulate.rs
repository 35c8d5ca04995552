//! `cadre simulate` as a user calls it.

#![expect(clippy::unwrap_used, reason = "helpers of tests may panic, too")]

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

fn cadre(folder: &Path, args: &[&str]) -> (Option<i32>, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_cadre"))
        .arg("simulate")
        .args(args)
        .current_dir(folder)
        .output()
        .expect("the program was built for this test");
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let length = |it: u64| if it.is_multiple_of(50) { 66_000 } else { 500 + it * 37 % 9_000 };
    let lengths: Vec<u64> = (0..40_000).map(length).collect();
    fs::write(folder.path().join("lengths.json"), serde_json::to_string(&lengths).unwrap())
        .unwrap();
    folder
}

#[test]
fn every_table_has_rows_and_a_picture() {
    let folder = folder();
    for (args, picture, key) in [
        (&["--table", "churn"][..], "churn-prolong.svg", "spread_ppm"),
        (&["--table", "scale", "--slots", "128"], "scale-prolong.svg", "plan_seconds"),
        (&["--table", "ours", "--nodes", "8"], "ours-prolong.svg", "ideal_nanos"),
        (&["--table", "published"], "published-prolong.svg", "packed_nanos"),
    ] {
        let all = ["--lengths", "lengths.json", "--set", "prolong", "--batches", "1"];
        let args = [args, &all, &["--json", "--figures", "figures"]].concat();
        let (code, out, said) = cadre(folder.path(), &args);
        assert_eq!((code, said.as_str()), (Some(0), ""), "{args:?}");
        let first: Value = serde_json::from_str(out.lines().next().unwrap()).unwrap();
        assert!(first.get(key).is_some(), "{out}");
        let svg = fs::read_to_string(folder.path().join("figures").join(picture)).unwrap();
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
    }
    let (code, table, _) = cadre(folder.path(), &["--table", "churn", "--lengths", "lengths.json"]);
    assert_eq!(code, Some(0));
    assert!(table.contains("weights 1:2:4") && table.contains("slot 1 is lost"), "{table}");
}

#[test]
fn bad_lengths_are_refused_by_name() {
    let folder = folder();
    let check = |text: &str, args: &[&str], expected: &str| {
        fs::write(folder.path().join("bad.json"), text).unwrap();
        let (code, out, said) = cadre(folder.path(), &[&["--table", "churn"], args].concat());
        assert_eq!((code, out.as_str()), (Some(2), ""), "{said}");
        assert!(said.starts_with("error: ") && said.lines().count() == 1, "{said}");
        assert!(said.contains(expected), "{said} does not contain {expected}");
    };
    let file = ["--lengths", "bad.json"];
    check("[]", &[], "--lengths is needed");
    check("[]", &["--lengths", "missing.json"], "missing.json");
    check("[]", &file, "lengths is empty");
    check("[5, 0]", &file, "lengths[1] is 0");
    check("[5, -1]", &file, "expected u64");
    check("[99999999999]", &file, "lengths[0] is 99999999999");
    check("[NaN]", &file, "bad.json");
    check("[100]", &file, "need more than the 1 documents");
    check("[100]", &["--batches", "0"], "--batches");
}
