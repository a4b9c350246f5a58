//! Which rank of how many this process is, from what its launcher left in the environment: mpirun, torchrun-style variables, or Slurm.

use std::fmt;

use suanpan_base::BadArgument;

use crate::plan::OP;

/// Who started the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    /// Open MPI's mpirun.
    Mpirun,
    /// `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, as torchrun sets them.
    Torchrun,
    /// Slurm's srun.
    Slurm,
    /// Nobody: one rank.
    Alone,
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Launcher::Mpirun => "mpirun",
            Launcher::Torchrun => "torchrun-style variables",
            Launcher::Slurm => "Slurm",
            Launcher::Alone => "no launcher",
        })
    }
}

/// A process's place in its job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Number of the process.
    pub rank: usize,
    /// Processes.
    pub world: usize,
    /// Number of the process on its machine: its device.
    pub local_rank: usize,
    /// Who says so.
    pub launcher: Launcher,
}

/// (launcher, rank, world, local rank) by the names of variables, in order of trust: a process under mpirun inside a Slurm job is mpirun's.
const NAMES: [(Launcher, [&str; 3]); 3] = [
    (Launcher::Mpirun, ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"]),
    (Launcher::Torchrun, ["RANK", "WORLD_SIZE", "LOCAL_RANK"]),
    (Launcher::Slurm, ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"]),
];

impl Launch {
    /// From the process's environment.
    pub fn from_env() -> Result<Launch, BadArgument> {
        Launch::from(|name| std::env::var(name).ok())
    }

    /// From these variables. Half a description is refused by the name of what is missing, not guessed.
    pub fn from(get: impl Fn(&str) -> Option<String>) -> Result<Launch, BadArgument> {
        for (launcher, [rank, world, local]) in NAMES {
            if get(rank).is_none() && get(world).is_none() {
                continue;
            }
            // An allocation without srun names tasks, and no process of them.
            if launcher == Launcher::Slurm && get(rank).is_none() {
                continue;
            }
            let number = |name: &str| -> Result<usize, BadArgument> {
                let text = get(name).unwrap_or_else(|| "nothing".into());
                let refused = || BadArgument::new(OP, name, &text, format!("a number: {launcher} sets it"));
                text.parse().map_err(|_| refused())
            };
            let launch =
                Launch { rank: number(rank)?, world: number(world)?, local_rank: number(local)?, launcher };
            if launch.rank >= launch.world {
                let supported = format!("below {world}, {}", launch.world);
                return Err(BadArgument::new(OP, rank, launch.rank, supported));
            }
            return Ok(launch);
        }
        Ok(Launch { rank: 0, world: 1, local_rank: 0, launcher: Launcher::Alone })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(variables: &[(&str, &str)]) -> Result<Launch, BadArgument> {
        Launch::from(|name| variables.iter().find(|(n, _)| *n == name).map(|(_, v)| v.to_string()))
    }

    #[test]
    fn every_launcher_says_who_one_is() {
        let launch = |rank, world, local_rank, launcher| Launch { rank, world, local_rank, launcher };
        assert_eq!(from(&[]).unwrap(), launch(0, 1, 0, Launcher::Alone));
        let torchrun = [("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1")];
        assert_eq!(from(&torchrun).unwrap(), launch(5, 8, 1, Launcher::Torchrun));
        let slurm = [("SLURM_PROCID", "3"), ("SLURM_NTASKS", "4"), ("SLURM_LOCALID", "3")];
        assert_eq!(from(&slurm).unwrap(), launch(3, 4, 3, Launcher::Slurm));
        let names = ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"];
        let both: Vec<_> = names.into_iter().zip(["1", "2", "0"]).chain(slurm).collect();
        assert_eq!(from(&both).unwrap(), launch(1, 2, 0, Launcher::Mpirun), "mpirun inside a Slurm job");
        assert_eq!(from(&slurm[1..]).unwrap().launcher, Launcher::Alone, "an allocation without srun");
    }

    #[test]
    fn half_a_description_is_refused_by_name() {
        let field = |variables: &[(&str, &str)]| from(variables).unwrap_err().field;
        assert_eq!(field(&[("RANK", "1"), ("LOCAL_RANK", "1")]), "WORLD_SIZE");
        assert_eq!(field(&[("WORLD_SIZE", "1")]), "RANK");
        assert_eq!(field(&[("RANK", "x"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")]), "RANK");
        assert_eq!(field(&[("RANK", "2"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")]), "RANK");
    }
}
