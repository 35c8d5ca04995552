//! `scripts/image` on the built programs: the same image twice, all of it named, and what it refuses.

use std::path::Path;
use std::process::{Command, Output};

use cadre_e2e::programs::root;
use serde_json::Value;

fn image(output: &Path, programs: &[&str]) -> Output {
    let mut command = Command::new(root().join("scripts/image"));
    command.arg("--output").arg(output);
    command.args(programs.iter().flat_map(|it| ["--program", it]));
    command.output().expect("python3 runs")
}

fn error(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    String::from_utf8(output.stderr.clone()).expect("words")
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).expect("a file of the image")).expect("JSON")
}

#[test]
fn the_same_programs_give_the_same_image_and_all_of_it_is_named() {
    let folder = tempfile::tempdir().unwrap();
    // target/release/deps/TEST
    let test = std::env::current_exe().unwrap();
    let operator = test.ancestors().nth(2).unwrap().join("cadre-operator");
    let operator = format!("/usr/local/bin/cadre-operator={}", operator.display());
    let (one, other) = (folder.path().join("one"), folder.path().join("other/layout"));
    let outputs = [&one, &other].map(|it| image(it, &[&operator]));
    let [first, second] = outputs.map(|it| {
        assert!(it.status.success(), "{it:?}");
        String::from_utf8(it.stdout).unwrap()
    });
    assert_eq!(first, second);
    let archives = [&one, &other].map(|it| std::fs::read(it.join("archive.tar")).unwrap());
    assert!(archives[0] == archives[1], "the archives differ");

    let manifest = &json(&one.join("index.json"))["manifests"][0];
    let architecture = if std::env::consts::ARCH == "aarch64" {
        "arm64"
    } else {
        println!("skipped: an image for arm64; the script makes one on arm64, of its programs");
        "amd64"
    };
    assert_eq!(manifest["platform"]["architecture"], architecture);
    let told = first.lines().last().unwrap();
    assert_eq!(manifest["digest"], told);
    let blobs = one.join("blobs/sha256");
    for blob in std::fs::read_dir(&blobs).unwrap() {
        let blob = blob.unwrap().path();
        let sum = Command::new("sha256sum").arg(&blob).output().unwrap().stdout;
        let name = blob.file_name().unwrap().as_encoded_bytes();
        assert!(sum.starts_with(name), "{}", blob.display());
    }
    let bill = json(&one.join("sbom.spdx.json"));
    let names: Vec<_> = bill["packages"]
        .as_array()
        .unwrap()
        .iter()
        .map(|it| it["name"].as_str().unwrap())
        .collect();
    for part in ["libc6", "cadre-operator", "kube", "tokio"] {
        assert!(names.contains(&part), "{part} is not in {names:?}");
    }
    assert!(!names.contains(&"proptest"), "what tests use is not in the image");
}

#[test]
fn what_cannot_be_an_image_is_refused_by_name_and_harms_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("image");
    let missing = error(&image(&output, &["/a=/no/such/program"]));
    assert!(missing.contains("/no/such/program, for /a, is not built; make image"), "{missing}");
    // A library that is of no package.
    let library = folder.path().join("libstray.so");
    let source = folder.path().join("main.c");
    std::fs::write(&source, "int main(void) { return 0; }").unwrap();
    let program = folder.path().join("program");
    let cc = |arguments: &[&str], to: &Path| {
        let path = format!("-Wl,--no-as-needed,-rpath,{}", folder.path().display());
        let status =
            Command::new("cc").arg(path).arg("-o").arg(to).arg(&source).args(arguments).status();
        assert!(status.unwrap().success());
    };
    cc(&["-shared", "-fPIC"], &library);
    cc(&[library.to_str().unwrap()], &program);
    let program = format!("/program={}", program.display());
    let stray = error(&image(&output, &[&program]));
    assert!(stray.contains("libstray.so is of no Debian package"), "{stray}");
    std::fs::remove_file(&library).unwrap();
    let gone = error(&image(&output, &[&program]));
    assert!(gone.contains("libstray.so, which this machine lacks"), "{gone}");
    assert!(!output.exists());
    // A folder of something else is not replaced.
    std::fs::create_dir(&output).unwrap();
    std::fs::write(output.join("mine"), "").unwrap();
    assert_eq!(image(&output, &[&program]).status.code(), Some(2));
    assert!(output.join("mine").exists());
}
