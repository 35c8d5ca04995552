//! Which exchange a process has, and how it is opened.
//!
//! In: what the user chose. Out: what opens that ([`How`]), once the controller has let the process in. Whoever matches it chooses
//! the types of the process's threads.

use std::path::Path;

use cadre_exchange::{Error, Paths, PathsConfig, Sharing, TcpConfig};
use cadre_kernels::device::{self, Gpu};

use super::Exchange;
use crate::memory;

/// How rows are to move.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Choice {
    /// From the host's memory: by shared memory where the peer is of this machine, by RDMA where both have it, else through sockets.
    #[default]
    Auto,
    /// From the host's memory, through sockets.
    Tcp,
    /// From the host's memory, by shared memory alone.
    Shared,
    /// From the host's memory, by UCX alone.
    Ucx,
    /// By copies of the GPU, between processes of one machine.
    Node,
}

/// How the rows of this process move, with what it takes to open that.
#[derive(Debug)]
pub enum How<'a> {
    /// From the host's memory.
    Paths(ByPaths),
    /// By copies of the GPU.
    Node(ByNode<'a>),
}

/// Opens an exchange for a process whose controller has let it in.
pub trait Open {
    /// What is opened.
    type Exchange: Exchange + Send + 'static;

    /// Opens it for these links.
    ///
    /// # Errors
    ///
    /// [`OpenError`].
    fn open(self, links: TcpConfig) -> Result<Self::Exchange, OpenError>;
}

/// See [`open_paths`].
#[derive(Clone, Copy, Debug)]
pub struct ByPaths(pub Sharing);

/// See [`super::ByGpu::open`].
#[derive(Clone, Copy, Debug)]
pub struct ByNode<'a> {
    /// Where rows live.
    pub gpu: &'a Gpu,
    /// Folder of sockets.
    pub sockets: &'a Path,
}

impl Open for ByPaths {
    type Exchange = Paths;

    fn open(self, links: TcpConfig) -> Result<Paths, OpenError> {
        Ok(open_paths(links, self.0)?)
    }
}

/// Why an exchange cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The links.
    #[error(transparent)]
    Links(#[from] Error),
    /// The GPU.
    #[error("--exchange node: the GPU gives no memory to the exchange: {0}")]
    Gpu(#[from] device::Error),
}

/// Opens paths for rows in the host's memory, which lie where `sharing` needs them from now on.
///
/// # Errors
///
/// [`Error`].
pub fn open_paths(tcp: TcpConfig, sharing: Sharing) -> Result<Paths, Error> {
    let paths = Paths::open(PathsConfig { tcp, sharing })?;
    if sharing != Sharing::Off {
        match memory::share_rows() {
            Ok(()) => {}
            Err(source) if matches!(sharing, Sharing::Required | Sharing::Ucx(_)) => {
                return Err(Error::Shared { source });
            }
            Err(error) => {
                tracing::info!(%error, "this machine gives no shared memory: peers get rows by tcp");
            }
        }
    }
    if paths.has_ucx() {
        // Else UCX registers each landing by itself, and has to notice when its memory is freed.
        match memory::keep_landings() {
            Ok(()) => {}
            Err(source) if matches!(sharing, Sharing::Ucx(_)) => {
                return Err(Error::Shared { source });
            }
            Err(error) => tracing::warn!(%error, "landings are registered again and again"),
        }
    }
    Ok(paths)
}
