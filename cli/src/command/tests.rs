//! The command line agrees with itself, and with the commands that the pages print.

use std::path::{Path, PathBuf};

use clap::CommandFactory;
use clap::error::ErrorKind;

use super::*;

#[test]
fn the_command_line_is_consistent() {
    Cli::command().debug_assert();
}

/// What only a workload has is no option of a job, where it would be passed over in silence.
#[test]
fn a_job_is_planned_with_no_option_of_a_workload() {
    let plan = |options: &[&str]| {
        let words = [&["cadre", "plan", "-f", "m.yaml", "--nodes", "2"], options].concat();
        Cli::try_parse_from(words).err().map(|it| it.to_string())
    };
    for options in [
        ["--workload", "w.json"],
        ["--slots", "3"],
        ["--layout", "head-tail"],
        ["--hidden-q", "4096"],
        ["--hidden-kv", "1024"],
        ["--heads", "32"],
        ["--head-dim", "128"],
        ["--out", "plan.json"],
    ] {
        let said = plan(&options).expect("it is refused");
        assert!(said.contains(options[0]) && said.contains("cannot be used with"), "{said}");
    }
    let both = ["--lanes", "2", "--weights", "100", "--tolerance", "1.1", "--picture", "p.svg"];
    assert_eq!(plan(&[&both[..], &["--json"]].concat()), None);
}

/// Commands of `cadre` in a page: lines of its `sh` blocks, and words in backquotes. Lines that end in a backslash go on in
/// the next one; comments, redirections and what follows a pipe are left out.
fn commands(page: &str) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    for (at, part) in page.split("```").enumerate() {
        let is_block = at % 2 == 1;
        let lines: Vec<String> = match part.strip_prefix("sh\n") {
            Some(block) if is_block => {
                block.replace("\\\n", " ").lines().map(str::to_owned).collect()
            }
            _ if is_block => Vec::new(),
            _ => part.split('`').skip(1).step_by(2).map(|it| it.replace('\n', " ")).collect(),
        };
        for line in lines {
            let bare = line.split(" #").next().unwrap_or_default();
            let mut words = bare.split_whitespace().map(str::to_owned).peekable();
            if words.peek().is_some_and(|it| it == "cadre" || it.ends_with("/release/cadre")) {
                let mine = words.take_while(|it| !matches!(&**it, "|" | "&&" | "\\" | ">" | "<"));
                let mine: Vec<String> = mine.collect();
                if mine.len() > 1 {
                    found.push(mine);
                }
            }
        }
    }
    found
}

/// Why a command is none. What is missing a page may leave out; a word in capitals stands for a value.
#[allow(clippy::wildcard_enum_match_arm, reason = "the library may know further kinds")]
fn complaint(words: &[String]) -> Option<String> {
    let Err(error) = Cli::try_parse_from(words) else { return None };
    let may = match error.kind() {
        ErrorKind::DisplayHelp
        | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
        | ErrorKind::MissingRequiredArgument
        | ErrorKind::MissingSubcommand => true,
        ErrorKind::InvalidValue | ErrorKind::ValueValidation => {
            let stands_for_a_value =
                |word: &String| word.chars().all(|it| it.is_ascii_uppercase() || it == '-');
            let ends_in_an_option = words.last().is_some_and(|it| it.starts_with('-'));
            words.iter().any(stands_for_a_value) || ends_in_an_option
        }
        _ => false,
    };
    (!may).then(|| format!("`{}`: {error}", words.join(" ")))
}

#[test]
fn every_command_that_the_pages_print_is_one() {
    let words = |line: &str| line.split(' ').map(str::to_owned).collect::<Vec<_>>();
    for (line, is_one) in [
        ("cadre run --help", true),
        ("cadre simulate --table churn --lengths FILE", true),
        ("cadre simulate --table none", false),
        ("cadre no-such-command", false),
        ("cadre plan --no-such-option", false),
    ] {
        assert_eq!(complaint(&words(line)).is_none(), is_one, "{line}");
    }

    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let docs = std::fs::read_dir(root.join("docs")).unwrap().map(|it| it.unwrap().path());
    let pages = ["README.md", "CONTRIBUTING.md"].iter().map(|it| root.join(it));
    let pages: Vec<PathBuf> =
        docs.filter(|it| it.extension().is_some_and(|it| it == "md")).chain(pages).collect();
    let mut seen = 0;
    let mut wrong = Vec::new();
    for page in pages {
        for words in commands(&std::fs::read_to_string(&page).unwrap()) {
            // Commands for a cluster are in the program that ships, not in one that only trains here.
            let for_clusters = ["status", "explain", "top", "logs", "bundle"];
            if cfg!(not(feature = "cluster")) && for_clusters.contains(&&*words[1]) {
                continue;
            }
            seen += 1;
            wrong.extend(complaint(&words).map(|it| format!("{}: {it}", page.display())));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(seen > 60, "{seen} commands were found");
}
