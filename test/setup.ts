// Runs before the tests of every file: they see none of the settings of the machine they run on.
for (const name of Object.keys(process.env)) {
  if (/^(MESHNET_|HF_|HUGGINGFACE_|VK_|XDG_CACHE_HOME$)/.test(name)) delete process.env[name];
}
