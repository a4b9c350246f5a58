//! How much memory this machine can give, from what the operating system says; nothing is allocated here.

use std::fs;

/// Memory of the host in bytes. A number is None where the system does not tell.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostMemory {
    /// The most this process can ever have: physical memory, or its control group's limit where that is lower.
    pub limit_bytes: Option<u64>,
    /// What could be had now without swapping.
    pub available_bytes: Option<u64>,
}

impl HostMemory {
    /// Asks the system (Linux: /proc/meminfo and the control group; elsewhere unknown).
    pub fn detect() -> HostMemory {
        let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let group = ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"]
            .iter()
            .find_map(|path| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok());
        HostMemory {
            limit_bytes: least(meminfo_bytes(&meminfo, "MemTotal:"), group),
            available_bytes: least(meminfo_bytes(&meminfo, "MemAvailable:"), group),
        }
    }
}

fn least(a: Option<u64>, b: Option<u64>) -> Option<u64> {
    [a, b].into_iter().flatten().min()
}

/// The value of a `Name:   123 kB` line.
fn meminfo_bytes(meminfo: &str, name: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lower_of_machine_and_control_group_counts() {
        let text = "MemTotal:       24684084 kB\nMemAvailable:   23568664 kB\n";
        assert_eq!(meminfo_bytes(text, "MemTotal:"), Some(24_684_084 * 1024));
        assert_eq!(meminfo_bytes(text, "MemAvailable:"), Some(23_568_664 * 1024));
        assert_eq!(meminfo_bytes("MemTotal: many kB", "MemTotal:"), None);
        assert_eq!(least(Some(5), Some(3)), Some(3));
        assert_eq!(least(None, Some(3)), Some(3));
        assert_eq!(least(None, None), None);
    }
}
