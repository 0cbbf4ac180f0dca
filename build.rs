//! What the linker is told of the program.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // See `wakeup` in src/main.rs. With two dashes, the linker of `zig cc` does not know the option.
    if std::env::var("CARGO_CFG_TARGET_OS").is_ok_and(|os| os == "linux") {
        println!("cargo:rustc-link-arg-bins=-Wl,-wrap=rd_kafka_msgq_allow_wakeup_at");
    }
}
