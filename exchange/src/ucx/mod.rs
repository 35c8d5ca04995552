//! Reads of a peer's memory by UCX, where the machine has it: the only code of this crate that calls it.
//!
//! In: memory to show, addresses and keys of peers, places to read. Out: [`Net`]; bytes that have landed, or why not. No peer, region
//! or pull is known here but by [`Flying`], which keeps a pull as long as something is written for it.
//!
//! UCX parses what peers say (addresses, keys) and believes it; so it comes from peers that have proved the job's secret. It
//! encrypts nothing and checks nobody.
//!
//! Invariant: memory that a read lands in stays until the read has ended or its worker is gone.

mod calls;
mod closing;
mod context;
mod flying;
mod net;
mod waking;

pub(crate) use self::flying::Flying;
pub(crate) use self::net::{Done, EndId, GetId, KeyId, Net, Read};
use crate::ucx_error::UcxError;

/// The transports that UCX may use. They are named here and not taken from UCX's environment variables.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Transports {
    /// RDMA of a network card, between machines.
    Rdma,
    /// Shared memory of one machine, where reads are answered by the owner's processor. For tests.
    SharedMemory,
    /// Sockets, where reads are answered by the owner's processor. For tests; with UCX 1.13 an owner that answers a reader which
    /// is gone ends its process.
    Sockets,
}

/// First UCX version whose newer protocols report errors of peers for RDMA reads. Earlier versions have to use the older
/// protocols.
const NEW_PROTOCOLS: (u32, u32) = (1, 19);

impl Transports {
    /// RDMA; or what `CADRE_UCX_OVER` says, `shm` or `tcp`, for tests on machines that have none.
    ///
    /// # Errors
    ///
    /// [`UcxError::Over`].
    pub fn asked() -> Result<Self, UcxError> {
        match std::env::var_os("CADRE_UCX_OVER") {
            None => Ok(Self::Rdma),
            Some(said) => Self::named(&said.to_string_lossy()),
        }
    }

    fn named(said: &str) -> Result<Self, UcxError> {
        match said {
            "rdma" => Ok(Self::Rdma),
            "shm" => Ok(Self::SharedMemory),
            "tcp" => Ok(Self::Sockets),
            _ => Err(UcxError::Over { said: said.to_owned() }),
        }
    }

    /// Names of the transports, as UCX spells them.
    pub(crate) fn names(self) -> &'static str {
        match self {
            Self::Rdma => "rc,dc",
            Self::SharedMemory => "sysv,posix",
            Self::Sockets => "tcp",
        }
    }

    /// Settings that override the environment.
    fn settings(self, (major, minor, _): (u32, u32, u32)) -> Vec<(&'static str, &'static str)> {
        let is_new = (major, minor) >= NEW_PROTOCOLS;
        let mut all = vec![
            // Cadre logs once itself what UCX would print there.
            ("LOG_LEVEL", "fatal"),
            ("TLS", self.names()),
            ("PROTO_ENABLE", if is_new { "y" } else { "n" }),
        ];
        if self == Self::SharedMemory {
            all.push(("MM_ERROR_HANDLING", "y"));
        }
        all
    }
}

/// Whether network cards alone do the reads over an endpoint, by what UCX prints of it. It prints lanes with their uses. Where it
/// names no lanes for reads (1.13 to 1.18, older protocols), it prints a line `get[N]` for each of them.
pub(crate) fn is_rdma(printed: &str) -> bool {
    let gets: Vec<_> = printed.lines().filter_map(|it| number(it, "get[")).collect();
    let reads = |line: &&str| {
        number(line, "lane[").is_some_and(|it| line.contains("rma") || gets.contains(&it))
    };
    let is_card = |line: &str| line.contains(":rc_") || line.contains(":dc_");
    let mut lanes = printed.lines().filter(reads).peekable();
    lanes.peek().is_some() && lanes.all(is_card)
}

/// The number behind a word of a line, before the closing bracket.
fn number<'a>(line: &'a str, word: &str) -> Option<&'a str> {
    line.split_once(word)?.1.split_once(']').map(|it| it.0)
}

/// Names of the transports and devices in what UCX prints of itself, each once.
fn devices(printed: &str) -> Vec<String> {
    let resources = printed.lines().filter(|it| it.contains(" resource "));
    let mut all: Vec<_> = resources
        .filter_map(|it| it.split_whitespace().last())
        .filter(|it| it.contains('/') && !it.starts_with("self/"))
        .map(str::to_owned)
        .collect();
    all.sort();
    all.dedup();
    all
}

/// The UCX of this machine, for reports: its version, and over what it could move bytes.
///
/// # Errors
///
/// [`UcxError`].
pub fn ucx_here() -> Result<(String, Vec<String>), UcxError> {
    let ucx = cadre_ucx_sys::ucx().map_err(Clone::clone)?;
    let (major, minor, release) = ucx.version();
    Ok((format!("{major}.{minor}.{release}"), devices(&context::print_all(ucx)?)))
}

/// Devices for RDMA that the kernel knows.
pub fn rdma_devices() -> Vec<String> {
    let mut devices: Vec<_> = std::fs::read_dir("/sys/class/infiniband")
        .into_iter()
        .flatten()
        .filter_map(|it| it.ok()?.file_name().into_string().ok())
        .collect();
    devices.sort();
    devices
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transports_that_nobody_knows_are_refused_by_their_name() {
        for (said, over) in [
            ("rdma", Transports::Rdma),
            ("shm", Transports::SharedMemory),
            ("tcp", Transports::Sockets),
        ] {
            assert_eq!(Transports::named(said), Ok(over));
        }
        for said in ["", "rc", "SHM"] {
            let refused = Transports::named(said).unwrap_err().to_string();
            assert!(
                refused.starts_with(&format!("CADRE_UCX_OVER is {said:?}: unset it")),
                "{refused}"
            );
        }
    }

    #[test]
    fn only_lanes_of_network_cards_are_rdma() {
        let lane = |name: &str, uses: &str| {
            format!("#      lane[0]:  0:{name}/mlx5_0:1.0 md[0]   -> md[0]/ib/sysdev[0] {uses}\n")
        };
        let end = "#                  rma_bw: mds #\n";
        let get = "#                  get[0]: 0..<bcopy>..945..<zcopy>..(inf)\n";
        for (lanes, right) in [
            (lane("rc_verbs", "rma#0 am am_bw#0"), true),
            (lane("rc_mlx5", "rma_bw#0") + &lane("dc_mlx5", "rma_bw#1"), true),
            (lane("rc_verbs", "am am_bw#0"), false),
            (lane("rc_verbs", "rma#0") + &lane("tcp", "rma_bw#1"), false),
            (lane("tcp", "am am_bw#0 keepalive"), false),
            (String::new(), false),
            // As UCX 1.13.1 says it, of lane 0.
            (lane("rc_verbs", "am am_bw#0") + get, true),
            (lane("tcp", "am am_bw#0") + get, false),
            (lane("rc_verbs", "am am_bw#0") + "#    put[0]: 0..<bcopy>..(inf)\n", false),
        ] {
            assert_eq!(is_rdma(&(lanes.clone() + end)), right, "{lanes}");
        }
    }
}
