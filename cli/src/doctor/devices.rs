//! GPUs and network cards of a machine, and which of them are near each other.
//!
//! In: what the kernel says of its buses, under a folder as `/sys`. Out: devices with the part of the machine that each is near, and
//! of each card the GPUs to which the way through the buses is shortest. Nothing is opened or tried.

use std::fs;
use std::path::{Path, PathBuf};

/// Vendor of the GPUs that attention runs on.
const NVIDIA: &str = "0x10de";
/// Classes of displays and of devices that compute.
const GPU_CLASSES: [&str; 2] = ["0x0300", "0x0302"];

/// A device.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Device {
    /// Address on the bus, or the kernel's name of a card.
    pub(super) name: String,
    /// The part of the machine that it is near; none where it has one part, or the kernel does not say.
    numa_node: Option<u32>,
    /// Bridges from the processor to it.
    route: Vec<String>,
}

impl Device {
    fn at(name: &str, folder: &Path) -> Self {
        let numa_node = read(&folder.join("numa_node")).and_then(|it| it.parse().ok());
        let whole = fs::canonicalize(folder).unwrap_or_else(|_| folder.to_path_buf());
        let parts = whole.components().map(|it| it.as_os_str().to_string_lossy().into_owned());
        let route = parts.skip_while(|it| !it.starts_with("pci")).collect();
        Self { name: name.to_owned(), numa_node, route }
    }

    /// How near another one is: bridges on the way to both, then whether both are near the same part.
    fn nearness(&self, other: &Self) -> (usize, bool) {
        let common = self.route.iter().zip(&other.route).take_while(|(a, b)| a == b).count();
        (common, self.numa_node.is_some() && self.numa_node == other.numa_node)
    }

    /// With the part of the machine that it is near.
    pub(super) fn described(&self) -> String {
        match self.numa_node {
            Some(node) => format!("{} (NUMA node {node})", self.name),
            None => self.name.clone(),
        }
    }
}

/// GPUs of the machine, by their addresses.
pub(super) fn gpus(sys: &Path) -> Vec<Device> {
    let is_gpu = |folder: &PathBuf| {
        let class = read(&folder.join("class")).unwrap_or_default();
        let is_one = GPU_CLASSES.iter().any(|it| class.starts_with(it));
        is_one && read(&folder.join("vendor")).as_deref() == Some(NVIDIA)
    };
    all(&sys.join("bus/pci/devices")).into_iter().filter(|it| is_gpu(&it.1)).map(device).collect()
}

/// Cards for RDMA, by their names.
pub(super) fn cards(sys: &Path) -> Vec<Device> {
    let folders = all(&sys.join("class/infiniband"));
    folders.into_iter().map(|(name, folder)| Device::at(&name, &folder.join("device"))).collect()
}

/// The GPUs that a card is nearest to; none where all are equally far.
pub(super) fn nearest<'a>(card: &Device, gpus: &'a [Device]) -> Vec<&'a Device> {
    let best = gpus.iter().map(|it| card.nearness(it)).max();
    let near: Vec<_> = gpus.iter().filter(|it| Some(card.nearness(it)) == best).collect();
    let is_told = gpus.len() == 1 || near.len() < gpus.len();
    if is_told && best > Some((0, false)) { near } else { Vec::new() }
}

fn device((name, folder): (String, PathBuf)) -> Device {
    Device::at(&name, &folder)
}

fn all(folder: &Path) -> Vec<(String, PathBuf)> {
    let entries = fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
    let mut all: Vec<_> =
        entries.filter_map(|it| Some((it.file_name().into_string().ok()?, it.path()))).collect();
    all.sort();
    all
}

fn read(file: &Path) -> Option<String> {
    fs::read_to_string(file).ok().map(|it| it.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// Its place below its bus, the name that leads there, and its files with what they say.
    type Planted<'a> = (&'a str, &'a str, &'a [(&'a str, &'a str)]);

    /// A machine with these devices, each at a place below its bus, and a name in another folder that leads there.
    fn machine(devices: &[Planted<'_>]) -> tempfile::TempDir {
        let sys = tempfile::tempdir().unwrap();
        for (place, name, says) in devices {
            let folder = sys.path().join("devices").join(place);
            fs::create_dir_all(&folder).unwrap();
            for (file, text) in *says {
                fs::write(folder.join(file), format!("{text}\n")).unwrap();
            }
            let link = sys.path().join(name);
            fs::create_dir_all(link.parent().unwrap()).unwrap();
            symlink(&folder, link).unwrap();
        }
        sys
    }

    #[test]
    fn each_card_is_told_with_the_gpus_behind_its_own_bridges() {
        let gpu =
            |node: &'static str| [("vendor", "0x10de"), ("class", "0x030200"), ("numa_node", node)];
        let (zero, one) = (gpu("0"), gpu("1"));
        let sys = machine(&[
            ("pci0000:00/0000:00:01.0/0000:02:00.0", "bus/pci/devices/0000:02:00.0", &zero),
            ("pci0000:00/0000:00:02.0/0000:04:00.0", "bus/pci/devices/0000:04:00.0", &zero),
            ("pci0000:80/0000:80:01.0/0000:82:00.0", "bus/pci/devices/0000:82:00.0", &one),
            // Another vendor's, and a bridge.
            (
                "pci0000:00/0000:00:09.0",
                "bus/pci/devices/0000:00:09.0",
                &[("vendor", "0x1a03"), ("class", "0x030000")],
            ),
            (
                "pci0000:00/0000:00:08.0",
                "bus/pci/devices/0000:00:08.0",
                &[("vendor", "0x10de"), ("class", "0x060400")],
            ),
            (
                "pci0000:00/0000:00:02.0/0000:05:00.0",
                "class/infiniband/mlx5_0/device",
                &[("numa_node", "0")],
            ),
            (
                "pci0000:80/0000:80:03.0/0000:85:00.0",
                "class/infiniband/mlx5_1/device",
                &[("numa_node", "1")],
            ),
            ("virtual/rxe0", "class/infiniband/rxe0/device", &[("numa_node", "-1")]),
        ]);
        let gpus = gpus(sys.path());
        let names: Vec<_> = gpus.iter().map(Device::described).collect();
        let expected = [
            "0000:02:00.0 (NUMA node 0)",
            "0000:04:00.0 (NUMA node 0)",
            "0000:82:00.0 (NUMA node 1)",
        ];
        assert_eq!(names, expected);
        let near: Vec<_> = cards(sys.path())
            .iter()
            .map(|card| {
                let near = nearest(card, &gpus);
                (card.described(), near.iter().map(|it| it.name.clone()).collect::<Vec<_>>())
            })
            .collect();
        let expected = [
            ("mlx5_0 (NUMA node 0)", vec!["0000:04:00.0"]),
            ("mlx5_1 (NUMA node 1)", vec!["0000:82:00.0"]),
            ("rxe0", vec![]),
        ];
        let expected = expected.map(|(card, gpus)| {
            (card.to_owned(), gpus.into_iter().map(str::to_owned).collect::<Vec<_>>())
        });
        assert_eq!(near, expected);
    }

    #[test]
    fn a_machine_without_them_has_none() {
        let sys = tempfile::tempdir().unwrap();
        assert!(gpus(sys.path()).is_empty() && cards(sys.path()).is_empty());
    }
}
