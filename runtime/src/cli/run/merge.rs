//! Options of the command line and of `--config-file` together.

use super::super::host_args::SshArgs;
use super::args::Run;
use crate::ssh::SshOptions;

/// Options of the command line over those of a file.
pub(crate) fn merge(line: Run, file: Run) -> Run {
    let places = line.hosts.is_some() || line.hostfile.is_some() || line.local;
    let output =
        line.output_dir.is_some() || line.output_filename.is_some() || line.log_dir.is_some();
    let looks = line.prefix.is_some() || line.timestamps;
    let joined = |first: Vec<String>, second: Vec<String>| [first, second].concat();
    Run {
        num_proc: line.num_proc.or(file.num_proc),
        nproc_per_node: line.nproc_per_node.or(file.nproc_per_node),
        nnodes: line.nnodes.or(file.nnodes),
        hosts: line.hosts.or(file.hosts.filter(|_| !places)),
        hostfile: line.hostfile.or(file.hostfile.filter(|_| !places)),
        local: line.local || (file.local && !places),
        cpus_per_worker: line.cpus_per_worker.or(file.cpus_per_worker),
        gpus_per_worker: line.gpus_per_worker.or(file.gpus_per_worker),
        // Of one name the last counts.
        env: joined(file.env, line.env),
        pass_env: joined(file.pass_env, line.pass_env),
        cwd: line.cwd.or(file.cwd),
        prefix: line.prefix.or(file.prefix.filter(|_| !looks)),
        timestamps: line.timestamps || (file.timestamps && !looks),
        ranks: line.ranks.or(file.ranks),
        output_dir: line.output_dir.or(file.output_dir.filter(|_| !output)),
        output_filename: line
            .output_filename
            .or(file.output_filename.filter(|_| !output)),
        log_dir: line.log_dir.or(file.log_dir.filter(|_| !output)),
        no_stdin: line.no_stdin || file.no_stdin,
        grace: line.grace.or(file.grace),
        start_timeout: line.start_timeout.or(file.start_timeout),
        timeout: line.timeout.or(file.timeout),
        wait: line.wait.or(file.wait),
        name: line.name.or(file.name),
        no_rendezvous: line.no_rendezvous || file.no_rendezvous,
        interfaces: if line.interfaces.is_empty() {
            file.interfaces
        } else {
            line.interfaces
        },
        no_cache: line.no_cache || file.no_cache,
        elastic: line.elastic.merge(file.elastic),
        torch: line.torch.merge(file.torch),
        ssh: merge_ssh(line.ssh, file.ssh),
        config_file: line.config_file,
        dry_run: line.dry_run,
        program: if line.program.is_empty() {
            file.program
        } else {
            line.program
        },
    }
}

fn merge_ssh(line: SshArgs, file: SshArgs) -> SshArgs {
    // What is at its default was not given, or might as well not have been.
    let usual = SshOptions::default();
    let installed = line.node_program.is_some() || line.remote_program.is_some();
    SshArgs {
        ssh_port: line.ssh_port.or(file.ssh_port),
        ssh_identity_file: line.ssh_identity_file.or(file.ssh_identity_file),
        ssh_config_file: line.ssh_config_file.or(file.ssh_config_file),
        ssh_program: if line.ssh_program == usual.program {
            file.ssh_program
        } else {
            line.ssh_program
        },
        ssh_connect_timeout: if line.ssh_connect_timeout == usual.connect_timeout {
            file.ssh_connect_timeout
        } else {
            line.ssh_connect_timeout
        },
        ssh_stall_timeout: if line.ssh_stall_timeout == usual.stall_timeout {
            file.ssh_stall_timeout
        } else {
            line.ssh_stall_timeout
        },
        ssh_local: line.ssh_local || file.ssh_local,
        node_program: line
            .node_program
            .or(file.node_program.filter(|_| !installed)),
        remote_program: line
            .remote_program
            .or(file.remote_program.filter(|_| !installed)),
    }
}
