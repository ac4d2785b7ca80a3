//! GPUs of a node: which it offers, and what jobs see of them.

use crate::process::{Daemon, NODE, Site, command};

/// A node with this `CUDA_VISIBLE_DEVICES`, if any.
fn node(site: &Site, name: &str, visible: Option<&str>, args: &[&str]) -> Daemon {
    let token = site.token(&format!("{name}.token"), &["--role", "node"]);
    let mut node = command(NODE);
    node.args(["--head", &site.address.to_string(), "--format", "json"])
        .args(["--cpus", "2", "--token-file"])
        .arg(token)
        .arg("--state-dir")
        .arg(site.path(name))
        .args(args)
        .env_remove("CUDA_VISIBLE_DEVICES")
        .env("SLURM_PROCID", "3");
    if let Some(visible) = visible {
        node.env("CUDA_VISIBLE_DEVICES", visible);
    }
    Daemon::spawn(node)
}

fn seen(site: &Site, args: &[&str]) -> String {
    let tell = "echo \"<${CUDA_VISIBLE_DEVICES-unset}> ${SLURM_PROCID-none}\"";
    let run = ["run", "--no-stdin", "--prefix", "none", "--cwd", "/"];
    let args = [&run[..], args, &["--", "sh", "-c", tell]].concat();
    let output = site.kolo(&site.admin(), &args);
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn a_job_without_gpus_sees_none_and_others_see_what_is_visible_here() {
    let site = Site::new(&[]);
    let node = node(&site, "node", Some("4,5,6"), &["--gpus", "2"]);
    let id = node.ready()["node"].as_str().unwrap().to_owned();
    assert_eq!(site.status_of(&id)["total"]["gpus"], 2);
    assert_eq!(seen(&site, &["-n", "1"]), "<> none\n");
    assert_eq!(seen(&site, &["--gpus-per-worker", "1"]), "<4> none\n");
    let both = ["-n", "2", "--gpus-per-worker", "1"];
    assert_eq!(seen(&site, &both), "<4,5> none\n<4,5> none\n");
    // Neither is the launcher's list of devices that of the node.
    assert_eq!(seen(&site, &["--pass-env", "*"]), "<> none\n");
    let own = ["--env", "CUDA_VISIBLE_DEVICES=6"];
    assert_eq!(seen(&site, &own), "<6> none\n");
}
