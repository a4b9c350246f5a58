//! A process that outlives its rank: mpirun ends a whole job when one of its processes is killed, before the others can say whom they miss.
//!
//! So the process that mpirun starts is a parent that does nothing, and the rank is its child. A killed child leaves the parent, which waits until
//! survivors have found out, reported, and ended the job with their own status. A child never outlives its parent.

use std::process::{Command, exit};
use std::time::{Duration, Instant};

use suanpan_base::BadArgument;

use crate::plan::OP;

/// Set for the child.
const CHILD: &str = "SUANPAN_RANK_CHILD";
/// Status of a rank that was killed, where no survivor ended the job.
const KILLED: i32 = 4;

/// Call it first in a process under MPI. In the child it returns `None`: go on. In the parent it returns the exit status, after the child; a
/// child that was killed is waited for `patience` longer, in which survivors end the job.
pub fn supervise(patience: Duration) -> Result<Option<i32>, BadArgument> {
    let refused = |what: &str, error: std::io::Error| BadArgument::new(OP, "supervise", error, what);
    // SAFETY: getppid reads a number; prctl with PR_SET_PDEATHSIG changes which signal this process gets when its parent ends.
    let parent = unsafe { libc::getppid() };
    if let Ok(expected) = std::env::var(CHILD) {
        // SAFETY: as above.
        unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
        // The parent may have ended before that.
        if expected != parent.to_string() {
            exit(KILLED);
        }
        return Ok(None);
    }
    let program = std::env::current_exe().map_err(|e| refused("a program that can be started again", e))?;
    let mut command = Command::new(program);
    command.args(std::env::args_os().skip(1)).env(CHILD, std::process::id().to_string());
    let status = command.status().map_err(|e| refused("a child process", e))?;
    let deadline = Instant::now() + patience;
    while status.code().is_none() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(Some(status.code().unwrap_or(KILLED)))
}
