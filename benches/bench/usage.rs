//! Reads the resource usage of processes from proc(5).

use std::time::{Duration, Instant};

use procfs::process::{Process, all_processes};

use crate::support::session::Session;

pub(crate) const MEBIBYTE: f64 = 1_048_576.0;

/// Returns the user and system CPU time of a process in seconds, including children that it has
/// waited for. Returns `None` if the process does not exist.
pub(crate) fn cpu_seconds(pid: u32) -> Option<f64> {
    let stat = process(pid)?.stat().ok()?;
    let children = stat.cutime + stat.cstime;
    let ticks = stat.utime + stat.stime + u64::try_from(children).unwrap_or(0);
    Some(ticks as f64 / procfs::ticks_per_second() as f64)
}

/// Returns the CPU time of a process and all its descendants, in seconds.
pub(crate) fn family_cpu_seconds(pid: u32) -> f64 {
    family(pid).into_iter().filter_map(cpu_seconds).sum()
}

/// Returns how long a process's current threads have waited for a processor, in seconds. Returns
/// `None` if the process does not exist. Reads /proc/PID/task/TID/schedstat, which no longer
/// contains threads that have exited.
pub(crate) fn waiting_seconds(pid: u32) -> Option<f64> {
    let tasks = process(pid)?.tasks().ok()?;
    let waits = tasks.filter_map(|task| Some(task.ok()?.schedstat().ok()?.run_delay));
    Some(waits.sum::<u64>() as f64 / 1e9)
}

/// Returns how long a process and all its descendants have waited for a processor, in seconds.
pub(crate) fn family_waiting_seconds(pid: u32) -> f64 {
    family(pid).into_iter().filter_map(waiting_seconds).sum()
}

/// Returns the number of threads of a process.
pub(crate) fn threads(pid: u32) -> usize {
    process(pid)
        .and_then(|process| process.tasks().ok())
        .map_or(0, Iterator::count)
}

/// Returns the peak resident memory of a process, in bytes.
pub(crate) fn peak_bytes(pid: u32) -> Option<u64> {
    Some(process(pid)?.status().ok()?.vmhwm? * 1024)
}

/// Returns the total peak resident memory of a process and all its descendants, in bytes.
pub(crate) fn family_peak_bytes(pid: u32) -> u64 {
    family(pid).into_iter().filter_map(peak_bytes).sum()
}

/// Returns the total resident memory of a process and all its descendants, in bytes.
pub(crate) fn family_resident_bytes(pid: u32) -> u64 {
    let resident = |pid| process(pid)?.status().ok()?.vmrss;
    family(pid).into_iter().filter_map(resident).sum::<u64>() * 1024
}

/// Returns the PIDs of a process and all its descendants.
pub(crate) fn family(pid: u32) -> Vec<u32> {
    let parents: Vec<(u32, u32)> = all_processes()
        .unwrap()
        .filter_map(|process| {
            let stat = process.ok()?.stat().ok()?;
            Some((
                u32::try_from(stat.pid).ok()?,
                u32::try_from(stat.ppid).ok()?,
            ))
        })
        .collect();
    let mut family = vec![pid];
    let mut next = 0;
    while let Some(&parent) = family.get(next) {
        let children = parents.iter().filter(|(_, ppid)| *ppid == parent);
        family.extend(children.map(|(child, _)| *child));
        next += 1;
    }
    family
}

/// Returns whether a child process has exited. Unlike `Child::try_wait`, this function does not
/// reap the process, so its CPU time and written bytes can still be read.
pub(crate) fn has_ended(pid: u32) -> bool {
    let stat = process(pid).and_then(|process| process.stat().ok());
    stat.is_none_or(|stat| stat.state == 'Z')
}

/// Returns the number of bytes that a process has written to files so far. Data sent over sockets
/// does not count.
pub(crate) fn written_bytes(pid: u32) -> Option<u64> {
    Some(process(pid)?.io().ok()?.wchar)
}

fn process(pid: u32) -> Option<Process> {
    Process::new(i32::try_from(pid).ok()?).ok()
}

/// Tracks the resource usage of a slot's walsender, including the usage of earlier walsenders if
/// the client has reconnected.
pub(crate) struct Walsender<'a> {
    db: &'a Session,
    slot: String,
    pid: Option<u32>,
    /// CPU time and waiting time of the current walsender process.
    seconds: f64,
    waiting: f64,
    /// CPU time and waiting time of earlier walsender processes.
    seconds_before: f64,
    waiting_before: f64,
    next_query: Instant,
}

impl<'a> Walsender<'a> {
    pub(crate) fn new(db: &'a Session, slot: &str) -> Self {
        Self {
            db,
            slot: slot.to_owned(),
            pid: None,
            seconds: 0.0,
            waiting: 0.0,
            seconds_before: 0.0,
            waiting_before: 0.0,
            next_query: Instant::now(),
        }
    }

    /// Reads the walsender's resource usage. Must be called frequently: when the process exits, its
    /// usage since the last call is lost.
    pub(crate) fn sample(&mut self) {
        const QUERY_INTERVAL: Duration = Duration::from_millis(50);
        if self.pid.is_none() && Instant::now() >= self.next_query {
            self.next_query = Instant::now() + QUERY_INTERVAL;
            let query = format!(
                "SELECT active_pid FROM pg_replication_slots WHERE slot_name = '{}'",
                self.slot
            );
            self.pid = self.db.value(&query).map(|pid| pid.parse().unwrap());
        }
        let Some(pid) = self.pid else { return };
        if let (Some(seconds), Some(waiting)) = (cpu_seconds(pid), waiting_seconds(pid)) {
            (self.seconds, self.waiting) = (seconds, waiting);
        } else {
            self.pid = None;
            self.seconds_before += std::mem::take(&mut self.seconds);
            self.waiting_before += std::mem::take(&mut self.waiting);
        }
    }

    /// Returns the total user and system CPU time as of the last sample, in seconds.
    pub(crate) fn cpu_seconds(&self) -> f64 {
        self.seconds_before + self.seconds
    }

    /// Returns the total time spent waiting for a processor as of the last sample, in seconds.
    pub(crate) fn waiting_seconds(&self) -> f64 {
        self.waiting_before + self.waiting
    }

    /// Returns whether a walsender was streaming from the slot at the last sample.
    pub(crate) fn is_running(&self) -> bool {
        self.pid.is_some()
    }
}
