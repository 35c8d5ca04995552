//! The limit of open files is raised to what a job needs, or the job is refused with the number.
//!
//! One test, since limits are the whole process's.

use cadre_exchange::allow_links;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

#[test]
fn a_low_limit_is_raised_and_one_that_cannot_be_is_refused_with_the_number() {
    let limit = |current, maximum| {
        let both = Rlimit { current: Some(current), maximum: Some(maximum) };
        setrlimit(Resource::Nofile, both).expect("limits may be lowered");
    };
    let maximum = getrlimit(Resource::Nofile).maximum.unwrap_or(1 << 20);
    limit(300, maximum.min(10_000));
    allow_links(1_024).expect("the machine allows it");
    assert!(getrlimit(Resource::Nofile).current >= Some(1_024 * 2), "a link each way");
    limit(300, 2_000);
    let refused = allow_links(1_024).expect_err("too few").to_string();
    assert!(refused.contains("1024 peers need 4096 open files, 2000 are allowed"), "{refused}");
    allow_links(100).expect("enough for so few");
}
