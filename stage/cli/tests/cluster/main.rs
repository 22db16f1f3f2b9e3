//! `kubectl splitmodel` against an API server that answers from a table.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]
#[path = "../common/mod.rs"]
#[allow(dead_code, reason = "each test uses its part")]
mod common;
mod fake;

use std::fs;
use std::io::{BufRead, Write};
use std::path::Path;
use std::process::{Command, Output, Stdio};

use common::{delta, json, models, sse};
use fake::{Cluster, MODELS, PODS, list};
use serde_json::{Value, json as value};
use splitmodel_gguf::Model;
use splitmodel_gguf::tiny::{Arch, Tiny};

const SERVING: &str = include_str!("../drawn/serving.yaml");

fn plugin(kubeconfig: &Path, args: &[&str], input: &str) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_kubectl-splitmodel"))
        .args(args)
        .env("KUBECONFIG", kubeconfig)
        .env("HTTPS_PROXY", "http://127.0.0.1:9")
        .env("http_proxy", "http://127.0.0.1:9")
        .env_remove("SPLITMODEL_API_KEY")
        .env_remove("KUBERNETES_SERVICE_HOST")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A program that reads no input may be gone.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    child.wait_with_output().unwrap()
}

fn stdout(out: &Output) -> &str {
    assert!(out.status.success(), "{out:?}");
    std::str::from_utf8(&out.stdout).unwrap()
}

fn failure(out: &Output) -> &str {
    assert_eq!(out.status.code(), Some(1), "{out:?}");
    std::str::from_utf8(&out.stderr).unwrap()
}

fn metrics(tokens: u32) -> String {
    json(
        "200 OK",
        &format!("# TYPE splitmodel_generated_tokens counter\nsplitmodel_generated_tokens_total {tokens}\n# EOF\n"),
    )
}

#[test]
fn status_draws_the_chain_and_measures_its_tokens() {
    let cluster = Cluster::start();
    cluster.model(SERVING);
    cluster.pod("qwen-0-0-0", vec![metrics(1000), metrics(1_000_000)]);
    let out = plugin(&cluster.kubeconfig(), &["status", "qwen"], "");
    let drawn = stdout(&out);
    let rate = drawn.lines().find_map(|l| l.trim().strip_prefix("TOKENS/S")).unwrap_or_else(|| panic!("{drawn}"));
    assert!(rate.trim().parse::<f64>().unwrap() > 0.0, "{drawn}");
    assert!(drawn.contains("┌─▶ 0") && drawn.contains("└── 2") && drawn.contains("qwen-0-2-0"), "{drawn}");
    let forwarded = cluster.forwarded();
    assert_eq!(forwarded.len(), 2);
    assert!(
        forwarded.iter().all(|(to, asked)| to == "qwen-0-0-0:7104" && asked.line == "GET /metrics HTTP/1.1"),
        "{forwarded:?}"
    );
}

#[test]
fn without_the_right_to_forward_the_rest_is_drawn() {
    let cluster = Cluster::start();
    cluster.model(SERVING);
    let forward = format!("{PODS}/qwen-0-0-0/portforward");
    cluster.refuse(
        &forward,
        403,
        "Forbidden",
        "pods \"qwen-0-0-0\" is forbidden: User \"u\" cannot create resource \"pods/portforward\"",
    );
    let out = plugin(&cluster.kubeconfig(), &["status", "qwen"], "");
    let drawn = stdout(&out);
    assert!(drawn.contains("qwen-0-2-0") && !drawn.contains("TOKENS/S"), "{drawn}");
    assert!(
        drawn.contains("tokens/s are not known: chain 0: the cluster does not allow it: pods \"qwen-0-0-0\""),
        "{drawn}"
    );
    assert!(drawn.contains("get and create pods/portforward"), "{drawn}");
}

#[test]
fn without_a_name_all_of_the_namespace_are_drawn() {
    let cluster = Cluster::start();
    let one = include_str!("../drawn/unplanned.yaml");
    let models = [one.to_owned(), one.replace("name: m,", "name: other,")];
    let models = models.iter().map(|text| serde_saphyr::from_str::<Value>(text).unwrap()).collect();
    cluster.answer(MODELS, list("SplitModel", models));
    let out = plugin(&cluster.kubeconfig(), &["status"], "");
    assert_eq!(stdout(&out).matches("Planned=False").count(), 2, "{out:?}");
    assert!(stdout(&out).contains("\n\nother  namespace team\n"), "{out:?}");
    let everywhere = "/apis/splitmodel.dev/v1alpha1/splitmodels";
    cluster.answer(everywhere, list("SplitModel", vec![]));
    assert_eq!(stdout(&plugin(&cluster.kubeconfig(), &["status", "-A"], "")), "the cluster has no SplitModels\n");
    cluster.answer(&MODELS.replace("team", "empty"), list("SplitModel", vec![]));
    for args in [&["status", "-n", "empty"], &["-n", "empty", "status"]] {
        let out = plugin(&cluster.kubeconfig(), args, "");
        assert_eq!(stdout(&out), "namespace empty has no SplitModels\n");
    }
    let out = plugin(&cluster.kubeconfig(), &["-n", "empty", "status", "-A"], "");
    assert_eq!(stdout(&out), "the cluster has no SplitModels\n");
    let out = plugin(&cluster.kubeconfig(), &["status", "-n", "b/../x"], "");
    assert_eq!(out.status.code(), Some(2), "{out:?}");
    assert!(std::str::from_utf8(&out.stderr).unwrap().contains("namespaces have lower-case letters"), "{out:?}");
}

#[test]
fn watching_ends_with_its_reader() {
    let cluster = Cluster::start();
    let model = SERVING.replacen("phase: Serving", "phase: Loading", 1);
    cluster.model(&model);
    let mut child = Command::new(env!("CARGO_BIN_EXE_kubectl-splitmodel"))
        .args(["status", "qwen", "--watch"])
        .env("KUBECONFIG", cluster.kubeconfig())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // As `| head -1` does.
    let mut first = String::new();
    std::io::BufReader::new(child.stdout.take().unwrap()).read_line(&mut first).unwrap();
    assert!(first.starts_with("qwen"), "{first}");
    cluster.model(SERVING);
    let out = child.wait_with_output().unwrap();
    assert!(out.status.success() && out.stderr.is_empty(), "{out:?}");
}

#[test]
fn the_long_form_is_the_same() {
    let cluster = Cluster::start();
    cluster.model(include_str!("../drawn/untouched.yaml"));
    let out = Command::new(env!("CARGO_BIN_EXE_splitmodel"))
        .args(["cluster", "status", "m", "--kubeconfig", cluster.kubeconfig().to_str().unwrap()])
        .output()
        .unwrap();
    assert_eq!(stdout(&out), include_str!("../drawn/untouched.txt"));
}

#[test]
fn what_is_wrong_is_said_with_the_remedy() {
    let cluster = Cluster::start();
    let config = cluster.kubeconfig();
    let status = |args: &[&str]| failure(&plugin(&config, &[&["status"], args].concat(), "")).to_owned();
    let said = status(&["m"]);
    assert!(said.contains("the cluster knows no SplitModels") && said.contains("helm install"), "{said}");
    cluster.refuse(&format!("{MODELS}/m"), 404, "NotFound", "splitmodels.splitmodel.dev \"m\" not found");
    let model = |name: &str| serde_saphyr::from_str::<Value>(&SERVING.replace("qwen", name)).unwrap();
    cluster.answer(MODELS, list("SplitModel", vec![model("a"), model("b")]));
    let said = status(&["m"]);
    assert!(said.contains("namespace team has no SplitModel `m`; there are a, b; --namespace"), "{said}");
    cluster.refuse(MODELS, 403, "Forbidden", "splitmodels is forbidden: User \"u\" cannot list resource");
    let said = status(&[]);
    assert!(
        said.contains("User \"u\" cannot list") && said.contains("right to list splitmodels in namespace team"),
        "{said}"
    );
    cluster.refuse(MODELS, 401, "Unauthorized", "Unauthorized");
    let said = status(&[]);
    assert!(said.contains("log in again"), "{said}");
    cluster.answer(MODELS, value!({"items": [{"metadata": {"name": "m"}, "spec": {"model": 3}}]}));
    let said = status(&[]);
    assert!(said.contains("is it as new as the operator?"), "{said}");
    let said = status(&["--context", "prod"]);
    assert!(said.contains("no context `prod`; it has fake"), "{said}");
    let out = plugin(&config, &["status", "../../nodes"], "");
    assert_eq!(out.status.code(), Some(2));

    let nowhere = cluster.dir.path().join("nowhere");
    let out = plugin(&nowhere, &["status"], "");
    assert!(failure(&out).contains("there is no kubeconfig; name one with --kubeconfig or in KUBECONFIG"), "{out:?}");
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let text = fs::read_to_string(&config).unwrap();
    let url =
        serde_json::from_str::<Value>(&text).unwrap()["clusters"][0]["cluster"]["server"].as_str().unwrap().to_owned();
    fs::write(&nowhere, text.replace(&url, &format!("http://{free}"))).unwrap();
    let out = plugin(&nowhere, &["status"], "");
    assert!(failure(&out).contains(&format!("the API server at http://{free} cannot be reached: ")), "{out:?}");
}

fn node(name: &str, memory: &str, cordoned: bool) -> Value {
    value!({
        "metadata": {"name": name}, "spec": {"unschedulable": cordoned},
        "status": {"conditions": [{"type": "Ready", "status": "True"}], "allocatable": {"memory": memory}},
    })
}

/// A manifest, and the model's file beside it.
fn scene(cluster: &Cluster, source: &str) -> (String, String) {
    let (manifest, model) = (cluster.dir.path().join("m.yaml"), cluster.dir.path().join("t.gguf"));
    Tiny::new(Arch::Llama).write(&model).unwrap();
    let text = format!(
        "apiVersion: splitmodel.dev/v1alpha1\nkind: SplitModel\nmetadata: {{name: tiny}}\nspec:\n  model: {{source: '{source}'}}\n  \
         stages: 2\n"
    );
    fs::write(&manifest, text).unwrap();
    (manifest.display().to_string(), model.display().to_string())
}

#[test]
fn a_plan_is_for_the_nodes_of_the_cluster() {
    let cluster = Cluster::start();
    let (manifest, model) = scene(&cluster, "pvc://models/t.gguf");
    let nodes = vec![node("zeta", "4Gi", false), node("alpha", "8Gi", false), node("cordoned", "8Gi", true)];
    cluster.answer("/api/v1/nodes", list("Node", nodes));
    let out = plugin(&cluster.kubeconfig(), &["plan", "-f", &manifest, "--facts", &model], "");
    let text = stdout(&out);
    assert!(text.starts_with("tiny llama 1: llama, 8 layers;"), "{text}");
    assert!(text.contains("    0  alpha ") && text.contains("    1  zeta "), "{text}");
    assert!(text.contains("cordoned is not used: it is cordoned."), "{text}");

    // What the inspect pod writes is as good as the file.
    let compact = cluster.dir.path().join("facts");
    fs::write(&compact, Model::open(&model).unwrap().facts().unwrap().to_compact().unwrap()).unwrap();
    let args = ["plan", "-f", &manifest, "--facts", compact.to_str().unwrap(), "--json", "--stages", "1"];
    let out = plugin(&cluster.kubeconfig(), &args, "");
    let plan: Value = serde_json::from_str(stdout(&out)).unwrap();
    assert_eq!(plan["plan"]["stages"].as_array().unwrap().len(), 1);

    cluster.answer("/api/v1/nodes", list("Node", vec![node("alpha", "1Mi", false), node("cordoned", "8Gi", true)]));
    let out = plugin(&cluster.kubeconfig(), &["plan", "-f", &manifest, "--facts", &model], "");
    let said = failure(&out);
    assert!(said.contains("are missing") && said.contains("cordoned is cordoned"), "{said}");
    cluster.answer("/api/v1/nodes", list("Node", vec![node("cordoned", "8Gi", true)]));
    let out = plugin(&cluster.kubeconfig(), &["plan", "-f", &manifest, "--facts", &model], "");
    assert!(failure(&out).contains("stage 0 finds no node: cordoned is cordoned"), "{out:?}");
    cluster.refuse("/api/v1/nodes", 403, "Forbidden", "nodes is forbidden");
    let out = plugin(&cluster.kubeconfig(), &["plan", "-f", &manifest, "--facts", &model], "");
    assert!(failure(&out).contains("right to list nodes"), "{out:?}");
    let out = plugin(&cluster.kubeconfig(), &["plan", "-f", &manifest, "--facts", &manifest], "");
    assert!(failure(&out).contains("m.yaml"), "{out:?}");
}

#[test]
fn a_plan_takes_what_the_operator_read_of_the_model() {
    let cluster = Cluster::start();
    let (manifest, model) = scene(&cluster, "pvc://models/t.gguf");
    cluster.answer("/api/v1/nodes", list("Node", vec![node("alpha", "8Gi", false)]));
    let plan = || plugin(&cluster.kubeconfig(), &["plan", "-f", &manifest], "");
    let absent = "splitmodels.splitmodel.dev \"tiny\" not found";
    cluster.refuse(&format!("{MODELS}/tiny"), 404, "NotFound", absent);
    let out = plan();
    assert!(failure(&out).contains("--facts") && failure(&out).contains("replicas: 0"), "{out:?}");

    let applied = fs::read_to_string(&manifest).unwrap();
    cluster.model(&applied.replace("{name: tiny}", "{name: tiny, namespace: team}"));
    let map = "/api/v1/namespaces/team/configmaps/tiny-facts";
    cluster.refuse(map, 404, "NotFound", "configmaps \"tiny-facts\" not found");
    let out = plan();
    assert!(failure(&out).contains("the operator has not read it yet"), "{out:?}");

    let facts = Model::open(&model).unwrap().facts().unwrap().to_compact().unwrap();
    let key = |text: &str| splitmodel_topology::names::inspect_key(&serde_saphyr::from_str(text).unwrap());
    cluster.answer(map, value!({"metadata": {"name": "tiny-facts"}, "data": {"facts": facts, "key": key(&applied)}}));
    assert!(stdout(&plan()).contains("alpha"), "{:?}", plan());
    cluster.answer(map, value!({"metadata": {"name": "tiny-facts"}, "data": {"facts": facts, "key": "of another"}}));
    assert!(failure(&plan()).contains("the operator has not read it yet"), "{:?}", plan());

    cluster.model(&applied.replace("pvc://models/t.gguf", "pvc://models/u.gguf"));
    assert!(failure(&plan()).contains("has another source"), "{:?}", plan());
}

#[test]
fn a_chat_goes_on_with_the_pod_that_comes_next() {
    let cluster = Cluster::start();
    cluster.model(SERVING);
    cluster.pod("qwen-0-0-0", vec![models(), sse(&[&delta("Grüß"), &delta(" dich"), "[DONE]"])]);
    cluster.pod("qwen-1-0-0", vec![sse(&[&delta("Bye."), "[DONE]"])]);
    let out = plugin(&cluster.kubeconfig(), &["chat", "qwen", "--max-tokens", "9"], "hello\nbye\n");
    assert_eq!(stdout(&out), "Grüß dich\nBye.\n");
    let forwarded = cluster.forwarded();
    let to: Vec<&str> = forwarded.iter().map(|(to, _)| to.as_str()).collect();
    assert_eq!(to, ["qwen-0-0-0:8000", "qwen-0-0-0:8000", "qwen-1-0-0:8000"]);
    assert_eq!(forwarded[2].1.body["messages"].as_array().unwrap().len(), 3, "the conversation is one");
    let pods = cluster.asked().into_iter().find(|line| line.starts_with(&format!("GET {PODS}?"))).unwrap();
    assert!(pods.contains("labelSelector=splitmodel.dev%2Fmodel%3Dqwen%2Csplitmodel.dev%2Fstage%3D0"), "{pods}");
}

#[test]
fn a_chat_with_what_does_not_serve_says_why() {
    let cluster = Cluster::start();
    cluster.model(include_str!("../drawn/forming.yaml"));
    let out = plugin(&cluster.kubeconfig(), &["chat", "big"], "hello\n");
    let said = failure(&out);
    assert!(said.contains("SplitModel big does not serve: stage 1 of chain 0 waits for a node"), "{said}");

    cluster.model(&SERVING.replace("stages: 3", "api: { keySecret: keys }"));
    cluster.pod("qwen-0-0-0", vec![models()]);
    let out = plugin(&cluster.kubeconfig(), &["chat", "qwen"], "hello\n");
    assert!(failure(&out).contains("--api-key: is missing: clients must present a key of Secret keys"), "{out:?}");

    cluster.model(SERVING);
    cluster.refuse(&format!("{PODS}/qwen-0-0-0/portforward"), 403, "Forbidden", "no forwarding for you");
    let out = plugin(&cluster.kubeconfig(), &["chat", "qwen"], "hello\n");
    assert!(failure(&out).starts_with("error: the cluster does not allow it: no forwarding for you"), "{out:?}");
}
