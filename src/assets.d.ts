// What the bundler embeds: shader text, and native libraries as a path for Bun.file.
declare module "*.wgsl" {
  const text: string;
  export default text;
}
declare module "*.so" {
  const path: string;
  export default path;
}
