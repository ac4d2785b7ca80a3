//! Being another process of the cluster, before `main` begins.

/// Becomes a daemon, a warden or a worker if the environment says so, and never returns then.
///
/// Test binaries do not need to call this: it runs before their `main`. Other programs that start a
/// [`TestCluster`](crate::TestCluster) call it first thing in `main`, or leave it to the same mechanism.
pub fn run_if_member() {
    kolo::worker::run_if_worker();
    crate::member::run_if_daemon();
}

/// The part that needs `unsafe`: an entry in `.init_array`.
#[allow(unsafe_code)]
mod init_array {
    use std::ffi::{c_char, c_int};

    type Initializer = extern "C" fn(c_int, *const *const c_char, *const *const c_char);

    unsafe extern "C" {
        // The end of the array, as the linker (GNU ld and lld) defines it.
        #[link_name = "__init_array_end"]
        static END: Initializer;
    }

    // A test binary's `main` belongs to the test runner, which knows nothing of workers. An entry in
    // `.init_array` runs after the C library is set up and before `main`; the standard library needs no
    // more than that on Linux for threads, input and output, environment and arguments.
    // SAFETY: the section is an array of such functions, and this one does not unwind: a panic in an
    // `extern "C"` function ends the process.
    #[used]
    #[unsafe(link_section = ".init_array")]
    static ENTRY: Initializer = before_main;

    extern "C" fn before_main(argc: c_int, argv: *const *const c_char, envp: *const *const c_char) {
        let roles = [
            kolo_process::WARDEN_FD_VAR,
            "KOLO_WORKER_FDS",
            crate::member::TASK,
        ];
        if roles.iter().all(|role| std::env::var_os(role).is_none()) {
            // A driver, then. It does no more than to note that.
            kolo::worker::run_if_worker();
            return;
        }
        // A role never returns to the C library, so the initializers behind this one would never run. The
        // cryptography needs its own: without it, it takes the processor for one without AES.
        let mut next = (&raw const ENTRY).wrapping_add(1);
        while next < &raw const END {
            // SAFETY: between this entry and the end of the array lie initialized entries; the linker put
            // them there for the C library to call just so, once each, in this order.
            unsafe { (*next)(argc, argv, envp) };
            next = next.wrapping_add(1);
        }
        // What the standard library does before `main`: a peer that is gone is an error, not a signal.
        // SAFETY: ignoring a signal installs no handler; there are no other threads yet.
        unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
        super::run_if_member();
    }
}
