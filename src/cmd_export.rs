//! `suanpan export MODEL FOLDER`: a built-in model as a folder that `transformers` and other servers load.

use std::path::PathBuf;

use suanpan_model::{builtin, export};

#[derive(clap::Args)]
pub struct ExportArgs {
    /// A built-in model: builtin:recall, builtin:chain, builtin:chain:hops=1 to 16, builtin:count.
    model: String,
    /// Where to: an empty or a new folder.
    folder: PathBuf,
    /// Print JSON: {"model", "architecture", "folder", "files": [{"name", "bytes"}]}.
    #[arg(long)]
    json: bool,
}

pub fn run(args: &ExportArgs) -> anyhow::Result<()> {
    anyhow::ensure!(args.model.starts_with(builtin::PREFIX), "{}: supported: {}", args.model, builtin::FORMS);
    let files = export::export(&args.model, &args.folder)?;
    if args.json {
        let list: Vec<_> =
            files.iter().map(|f| serde_json::json!({"name": f.name, "bytes": f.bytes})).collect();
        let report = serde_json::json!({
            "model": args.model, "architecture": "SmolLM3ForCausalLM", "folder": args.folder.display().to_string(), "files": list,
        });
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        println!("{} as SmolLM3ForCausalLM in {}", args.model, args.folder.display());
        files.iter().for_each(|f| println!("  {:<24}{:>12} bytes", f.name, f.bytes));
    }
    Ok(())
}
